"""Judging a classifier on sets of images: what a set is, what is counted, what it comes to.

`sets` says where a set lies and what its labels mean to the model, `counts` sums on the device,
`verdict` turns the sums into metrics and tables, `corrupted` into the errors of ImageNet-C, and
`judge` reads the sets.
"""
