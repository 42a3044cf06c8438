"""Kernels and rules side by side: what they cost, and whether they are right."""
