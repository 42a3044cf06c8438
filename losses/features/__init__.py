"""Distillation losses on activations."""
