"""Demo, benchmarks and studies of published results, written with the public names of lapwing only."""
