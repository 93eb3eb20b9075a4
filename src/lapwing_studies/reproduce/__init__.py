"""`lapwing reproduce`: experiments on real data, each (network, seed) kept in the output folder and never run twice."""
