"""Sweeps: many runs from one file, each a function of the file and its number.

`spec` is the file of a person, `plan` makes trials of it and keeps it in the store, `study` samples
points with Optuna, `control` submits and waits, `report` tabulates the trials by their axes.
"""
