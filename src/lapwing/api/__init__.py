"""The front door: the user's words become objects here, and nowhere else."""
