"""backupd: backup and recovery for MySQL, Percona Server and MariaDB."""
