"""Submit, watch, stop and compare runs from one place, built on the store.

It starts `main.py` as a child, and imports no engine, no job, no model and no torch; no trainer
imports it. `web/` is the HTTP API and the dashboard, the only room of web libraries.
"""
