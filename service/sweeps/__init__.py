"""Sweeps: many runs from one file, each a function of the file and its number.

`spec` is what a person writes, `plan` makes trials of it and keeps it in the store, `study` asks
Optuna, `control` submits and waits, `report` says how trials stand and what their axes tell.
"""
