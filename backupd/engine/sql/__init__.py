"""The connection: client, option files, TLS, dialects, tables, tokens of SQL."""
