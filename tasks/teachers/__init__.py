"""Teachers of a step, live or stored."""
