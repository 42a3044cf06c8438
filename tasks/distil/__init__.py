"""Learning the features of other models without labels."""
