"""Randomness that can be repeated, and how much of it: `make soak` asks for more rounds than the tests do."""

from __future__ import annotations

import os
import random

import pytest

SOAK = pytest.mark.soak
"""Of a test that is dear, and near another one that always runs."""


def thrown(name: str) -> random.Random:
    """A generator for the test ``name``, from $BACKUPD_SEED or fresh; its seed is printed with the test's output."""
    seed = os.environ.get("BACKUPD_SEED") or str(random.SystemRandom().randrange(2**32))
    print(f"{name}: BACKUPD_SEED={seed}")
    return random.Random(f"{seed}/{name}")


def rounds(few: int) -> int:
    """How often a campaign repeats: ``few`` in the tests, $BACKUPD_ROUNDS in a soak."""
    return int(os.environ.get("BACKUPD_ROUNDS", few))


def size(few: int, many: int) -> int:
    """How much a dear test takes: ``few`` in the tests, ``many`` in a soak."""
    return many if "BACKUPD_ROUNDS" in os.environ else few


def with_another_end(data: bytes) -> bytes:
    """``data`` whose last byte is another one, whatever it was: what is sealed ends in any."""
    return data[:-1] + bytes([data[-1] ^ 0x01])
