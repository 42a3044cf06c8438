"""The trackers to which a run can be sent: each imports its client when it is opened."""
