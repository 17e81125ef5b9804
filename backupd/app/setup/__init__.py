"""A first installation: what `backupd setup` finds, will do and does."""
