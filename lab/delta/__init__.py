"""The rules of delta attention side by side: `python -m lab.delta`."""
