"""`python -m tools.export`: a model in other programs' forms, each read back and compared."""
