"""What a run writes: its directory, lock, metrics, spans, hits and summary."""
