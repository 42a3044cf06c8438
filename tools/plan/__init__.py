"""Hours and money of a run on each slice, before it starts."""
