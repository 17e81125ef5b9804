"""Loading rows into a server."""
