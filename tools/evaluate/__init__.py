"""Evaluates weights on sets of images: `python -m tools.evaluate`."""
