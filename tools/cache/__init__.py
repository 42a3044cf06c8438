"""Stored outputs of teachers: written, described, verified, merged and cut."""
