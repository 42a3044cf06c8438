"""The processes of a run: how they start, reach each other and end."""
