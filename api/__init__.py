"""The REST API and web page of backupd stand on this layer, between the command line and the application."""
