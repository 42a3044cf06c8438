"""The loss of a student without labels."""
