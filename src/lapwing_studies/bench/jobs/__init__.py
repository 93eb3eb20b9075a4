"""Whole jobs: train, fit, tune and predict with default arguments, beside what a user would do instead."""
