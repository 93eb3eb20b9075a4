"""Execution environment: copies of the user's model, random state, progress bar, distributed processes."""
