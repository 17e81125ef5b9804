"""Running programs: commands as values, pipelines whose end is a promise, redaction, throttle."""
