"""Stored answers of teachers: written, described, verified, merged and cut."""
