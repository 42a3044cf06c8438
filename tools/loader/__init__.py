"""Input pipelines by flags, for the programs that check them."""
