"""Restored tables take the place of the live ones by one RENAME."""
