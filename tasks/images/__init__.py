"""What tasks of images share: pixels on the device, mixing, erasing, resizing."""
