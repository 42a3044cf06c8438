"""What the programs that look at a loader share."""
