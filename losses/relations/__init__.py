"""Distillation losses between examples, views and positions."""
