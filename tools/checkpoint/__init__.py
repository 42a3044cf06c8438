"""Checkpoints of runs: listed, verified, compared, exported and pruned."""
