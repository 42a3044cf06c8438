"""Reads the VLIW bundles that libtpu writes of every operation, and how often each is issued."""
