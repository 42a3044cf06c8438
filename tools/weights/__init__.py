"""Weights and images for programs: their flags, and how they are opened."""
