"""The trackers that a run can be sent to: each module imports its client when it is opened."""
