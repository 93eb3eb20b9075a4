"""`lapwing reproduce`: experiments on real data. Each (network, seed) is stored in the output folder and run once."""
