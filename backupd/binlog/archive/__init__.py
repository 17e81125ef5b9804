"""From the spool to the destinations: pieces, checkpoints, what each destination has."""
