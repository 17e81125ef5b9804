"""The schema of policies and configuration: validation, examples and reference come from it."""
