"""Tables of the documents: each program trains, compares and writes its table."""
