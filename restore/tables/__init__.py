"""Restoring single tables and schemas."""
