"""The web pages, made on the server."""
