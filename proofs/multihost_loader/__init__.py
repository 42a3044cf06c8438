"""Reads a dataset on several ranks and checks what they read together."""
