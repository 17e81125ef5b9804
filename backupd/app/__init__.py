"""The application: every job is resolve (catalog to spec), execute (no catalog), record (rows)."""
