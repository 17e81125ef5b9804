"""What every use case is given: settings, wiring, who asks, which destinations and keys, the audit."""
