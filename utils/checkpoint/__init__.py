"""Checkpoints: plain CPU tensors and JSON, whole or absent.

`files` writes and reads one checkpoint, `manager` those of a run, `find` resolves a path to one,
`state` converts a train state to tensors and facts and back, `fit` compares tensors by name.
"""
