"""Reading binary logs: events, transactions, row changes, statements, the index."""
