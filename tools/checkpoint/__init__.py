"""What a run has saved."""
