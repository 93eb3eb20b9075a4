"""The public functions: words and objects of the user become objects of the library, here and nowhere else."""
