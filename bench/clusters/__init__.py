"""Nodes that come back, and new replicas."""
