"""A run's step without its data: the likeness of the run, its trace and its program."""
