"""The HTTP API and the dashboard: `app` puts it together, `gate` stands in front of all of it.

`tokens` tells who asks, `audit` keeps what was done, `problems` says what is wrong in one form,
`catalogue` answers for the runs of a store, `answers` are the forms of all answers.
"""
