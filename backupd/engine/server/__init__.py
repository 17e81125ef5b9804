"""One server: what it is and holds, what it may do, definitions and accounts as scripts; private servers in a sandbox."""
