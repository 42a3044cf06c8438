"""Distillation losses on logits."""
