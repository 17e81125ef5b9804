"""The plan: target, starting backup, steps, tables, estimates. Pure but for what it is given to ask."""
