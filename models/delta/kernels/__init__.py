"""Pallas kernels of the delta rules, and other packages' kernels."""
