"""Which event opens and closes which incident, and what is written about it. Values in, values out."""
