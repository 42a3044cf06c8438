"""What `tools/benchmark.py` is made of: configuration, loop, bare loop, FLOPs, peaks, reports."""
