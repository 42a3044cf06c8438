"""What is known of single steps: their profile, and one that was not finite."""
