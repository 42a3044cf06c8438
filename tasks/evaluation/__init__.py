"""Evaluation of a classifier on sets of images.

`sets` says where a set lies and what its labels mean to the model, `counts` sums on the device,
`verdict` turns the sums into metrics and tables, and `judge` reads the sets.
"""
