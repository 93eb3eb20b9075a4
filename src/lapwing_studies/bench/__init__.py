"""Benchmark cases and their runners; results are plain records (JSON). Uses public names of lapwing only."""
