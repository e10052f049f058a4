"""HTTP: bodies become requests, deltas become events. No torch, no engine; what it serves is any `Backend`."""
