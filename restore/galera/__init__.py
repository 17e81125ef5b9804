"""A dead node of a Galera cluster comes back out of a backup: by IST, not by an SST."""
