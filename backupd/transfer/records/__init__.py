"""The documents at a destination: manifests, segments, proofs, heads, signatures."""
