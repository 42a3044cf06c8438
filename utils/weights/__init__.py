"""Weights behind a path, whatever stands there: a file, a run, a checkpoint, a shared model.

`opening` tells what a path means, `source`, `archives` and `hub` are its forms, `files` reads and
writes files of weights, `fitting` makes them fit a model, `meaning` says what tensors mean beside
names and shapes, `load` brings them in, `beside` finds the run that they belong to, `adapters`
makes what was added for training part of the weights, `class_names` compares what two sides call
their classes.
"""
