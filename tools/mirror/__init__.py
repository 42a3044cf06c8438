"""Sends runs to other trackers, beside the trainer and never in it."""
