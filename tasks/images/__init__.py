"""Shared code of tasks of images: pixels on the device, mixing, erasing, resizing."""
