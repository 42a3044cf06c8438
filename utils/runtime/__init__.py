"""A runtime executes a run: `launch` starts it, `create_runtime` gives the parts their device.

`choice` decides which runtime it is and `launcher` starts it. `base` says what a runtime can do;
`cpu`, `cuda`, `xla` and `xla_spmd` are the runtimes. `ranks` and `xla_ranks` hold what the
processes of a run do together, `group` and `processes` how they reach each other, start and end.
"""
