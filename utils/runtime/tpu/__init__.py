"""TorchTPU: runtime, start, stand-in and the program of a step."""
