"""Runs on TPUs through SkyPilot."""
