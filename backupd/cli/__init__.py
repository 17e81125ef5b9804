"""The command line: words in, the application's answers out. No decision is made here."""
