"""Tells whether a machine is fit: what is looked at, one room for each kind of thing."""
