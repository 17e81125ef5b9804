"""New replicas: a restored copy that follows a source."""
