"""Deleting what nothing names any more."""
