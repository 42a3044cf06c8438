"""Delta attention: rules with a state of fixed size, token by token and a chunk at a time."""
