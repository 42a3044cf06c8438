"""Reads runs: records, filters, lists, timelines and what may change between attempts."""
