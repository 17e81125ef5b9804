"""The service: its threads, its workers, the process of the API."""
