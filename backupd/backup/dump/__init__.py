"""A logical backup: the short lock, the passes, row counts."""
