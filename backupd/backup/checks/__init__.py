"""What is looked at before a backup, and what `backupd check` reports."""
