"""Exports of a model for other programs, read back and compared: `python -m tools.export`."""
