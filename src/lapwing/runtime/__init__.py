"""What surrounds a computation: the borrowed model, the progress bar, several processes."""
