"""Plants faults and looks which tests find them: faults, tests that cover a line, runs of them."""
