"""Installations of many servers: what their catalog, their schedules and an hour of their work cost."""
