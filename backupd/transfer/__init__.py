"""Between plaintext and destinations: sealing, packing, fan-out, dedup, removal."""
