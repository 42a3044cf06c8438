"""Curves: a run's numbers as columns, in as many points as a chart shows."""
