"""What to keep and what may go: pure decisions with their reasons."""
