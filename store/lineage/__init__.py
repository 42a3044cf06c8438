"""Which runs taught a run, which it has taught, and secrets that its texts may hold."""
