"""A runtime executes a run: `launch` starts it, `create_runtime` gives the parts their device.

`choice` selects a runtime and `launcher` starts it. `base` is the interface of runtimes; `cpu`,
`cuda` and `xla` implement it. `processes` connects the processes of a run, starts and ends them.
"""
