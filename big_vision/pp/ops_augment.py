"""Random augmentations of colour and shape."""
