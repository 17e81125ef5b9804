"""What forms and buttons of the web pages do."""
