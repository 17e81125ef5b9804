"""The continuous copy of binary logs: stream, spool, archive."""
