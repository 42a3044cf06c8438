"""Checkpoints: plain CPU tensors and JSON, whole or not there.

`files` writes and reads one checkpoint, `manager` those of a run, `find` tells which one a path
means, `state` turns a train state into tensors and facts and back, `fit` compares tensors by name.
"""
