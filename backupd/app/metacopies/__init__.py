"""Sealed copies of catalog and configuration at each destination, and the way back from them."""
