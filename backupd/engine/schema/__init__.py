"""Definitions of objects: reading, comparing, and writing them as scripts; accounts."""
