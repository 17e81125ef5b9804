"""What a process that is killed in the middle of a put reads from."""

SLOW_SOURCE = """
import io, sys

class Slow(io.RawIOBase):
    count = 0
    def read(self, size=-1, /):
        self.count += 1
        if self.count == 3:
            print("midway", flush=True)
            sys.stdin.read()
        return b"x" * size
"""
"""Python that defines a stream which says "midway" at its third read, and waits there for its parent."""
