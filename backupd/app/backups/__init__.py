"""One backup from its job to its row: physical or logical, full or increment, hooks and limits."""
