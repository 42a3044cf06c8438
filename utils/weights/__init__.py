"""Weights of any form behind a path: a file, a run, a checkpoint, a shared model.

`opening` resolves a path; `source`, `archives`, `hub` and `language` are its forms; `files` reads
and writes files of weights; `fitting` adapts them to a model; `meaning` compares what tensors mean
beyond names and shapes; `load` copies them; `adapters` merges what was added for training;
`class_names` compares the classes of two sides.
"""
