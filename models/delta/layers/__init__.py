"""Layers and models around the delta rules."""
