"""Compares runs: numbers in, findings out. Nothing here prints or writes.

`statistics` judges samples, `sides` gathers the numbers of runs that belong together,
`differences` tells what was set otherwise, `divergence` where two equal runs part, `tensors` what
differs in two checkpoints.
"""
