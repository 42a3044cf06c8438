"""Replay of a step that was not finite."""
