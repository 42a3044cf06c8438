"""What `tools/mutants.py` is made of: faults, the tests that cover a line, runs of them."""
