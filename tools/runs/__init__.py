"""Asks the run store: see `python -m tools.runs --help`."""
