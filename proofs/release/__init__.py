"""Releases: what has changed since the last one, and whether the checkout is fit for the next."""
