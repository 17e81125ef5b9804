"""Copies at the other destinations: replication, protection, repair."""
