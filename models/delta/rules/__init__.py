"""The delta rules: token by token, and a chunk at a time."""
