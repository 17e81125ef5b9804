"""How answers look on a terminal, and as JSON."""
