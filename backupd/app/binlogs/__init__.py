"""Archived binary logs: streams and their supervisor, the search, targets of restores."""
