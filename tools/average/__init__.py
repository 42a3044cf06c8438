"""One model out of several."""
