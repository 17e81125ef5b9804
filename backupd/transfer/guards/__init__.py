"""What keeps objects from being deleted while they are used: intents, pins, leases, marks, locks."""
