"""Applying archived binary logs to a private server."""
