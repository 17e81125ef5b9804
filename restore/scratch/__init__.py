"""A private server on a restored copy: for tables, proofs and subsets."""
