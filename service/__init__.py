"""Submit, watch, stop and compare runs from one place, built on the store.

It starts `main.py` as a child, and imports no engine, no model and no torch; no trainer imports it.
`jobs/` is the queue of this machine (its `warm_child` is forked into runs), `checker` asks what
`main.py --check` would say (by `checker_child`; these two files alone import what trains), `web/`
is the HTTP API and the dashboard, the only room of web libraries.
"""
