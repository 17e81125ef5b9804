"""The doors of the application: facades for the command line, REST and the page, and the dispatcher of jobs."""
