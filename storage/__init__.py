"""Where backups lie: one contract, and a driver for each kind of destination."""
