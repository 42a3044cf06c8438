"""What a model says of images."""
