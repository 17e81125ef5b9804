"""Sending: the notifier reads events and opens incidents, the sender delivers messages to mail and channels."""
