"""Asks the compiler of a TPU that is not here: the library of compile_for_tpu and shape_advisor."""
