"""Restoring a whole server."""
