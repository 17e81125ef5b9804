"""Private servers: launched in a sandbox, with the options that a backup needs."""
