"""Fetching and verifying the objects of a chain, and preparing it."""
