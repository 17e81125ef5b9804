"""Between plaintext and destinations: encryption, packing, fan-out, dedup, removal."""
