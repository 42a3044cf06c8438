"""Measures a run's steps: configuration, loop, bare loop, FLOPs, peaks, reports."""
