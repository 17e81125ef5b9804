"""Compression, OpenPGP, and the identity of contents."""
