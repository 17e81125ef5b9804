"""Rolling forward with archived binary logs, on a private server."""
