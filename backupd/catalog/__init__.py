"""The catalog: one module per aggregate, its tables beside it; values in, values out."""
