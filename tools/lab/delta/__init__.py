"""The rules of delta attention side by side: `python -m tools.lab.delta`."""
