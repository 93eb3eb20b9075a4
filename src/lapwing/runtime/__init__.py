"""What surrounds a computation: copies of the user's model, random state, progress bar, processes."""
