"""Evaluates weights on sets of images: `python -m tools.evaluate`; `__main__` tells how."""
