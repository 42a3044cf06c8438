"""The HTTP API and the dashboard: `app` builds them, `gate` checks every request first.

`tokens` identifies callers, `audit` records changes, `problems` formats refusals, `catalogue`
finds the runs of a store, `answers` has the models of all answers.
"""
