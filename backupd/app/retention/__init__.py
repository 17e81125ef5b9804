"""What retention decided is previewed, marked, deleted, and taken back."""
