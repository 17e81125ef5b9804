"""The same work by backupd and by the bare tools, in one run, as ratios."""
