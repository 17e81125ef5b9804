"""Another host by SFTP; paramiko is imported here alone."""
