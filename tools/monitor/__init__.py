"""Shows how a run gets on, from its files alone: what is read, what devices say, the table."""
