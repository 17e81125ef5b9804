"""Where backups are stored: one contract, and a driver for each kind of destination."""
