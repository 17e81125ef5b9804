"""Tables of the catalog that several of its modules read, and what is kept in step with their rows."""
