"""The HTTP API and the dashboard: `app` builds it, `gate` checks every request first.

`tokens` identifies callers, `audit` records changes, `problems` formats refusals, `catalogue`
serves the runs of a store, `answers` are the models of all answers.
"""
