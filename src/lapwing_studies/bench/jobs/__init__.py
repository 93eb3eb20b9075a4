"""End-to-end jobs: train, fit, tune and predict with default arguments, compared with alternatives."""
