"""Shows the progress of a run, from its files and its devices."""
