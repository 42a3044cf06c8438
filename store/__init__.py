"""The run store: one directory for each run, with its configuration, status and environment."""

from store.runs import Run, RunStore, get_environment

__all__ = ["Run", "RunStore", "get_environment"]
