"""Reading stored files again: verification, its rotation, samples out of archive classes."""
