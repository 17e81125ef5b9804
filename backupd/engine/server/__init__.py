"""Questions to a running server: what it is, what it holds, what it may do, what would harm a backup."""
