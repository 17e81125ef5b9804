"""Taking backups: preflight and the physical backup."""
