"""One server: what it is, holds and may do; definitions and accounts as scripts; private servers in a sandbox."""
