"""Physical backups: mariadb-backup, XtraBackup, CLONE; their streams, files and preparation."""
