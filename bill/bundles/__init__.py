"""Bundles of instructions: how many a compiled step takes, and what each does."""
