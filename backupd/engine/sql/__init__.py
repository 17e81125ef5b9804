"""The connection: client, option files, TLS, dialects, tokens of SQL."""
