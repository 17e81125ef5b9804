"""Frozen values and pure functions: the words of the project. Standard library only, no I/O, no clock."""
