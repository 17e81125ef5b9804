"""A folder as a destination."""
