"""How many sessions a dump is given: pure."""

from __future__ import annotations

import pytest

from backupd.backup.dump_pass import sessions

MIB = 1024 * 1024


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([], 2),
        ([16384] * 40, 2),
        ([16384] * 129, 3),
        ([16384] * 5000, 4),
        ([128 * MIB], 2),
        ([128 * MIB + 1], 3),
        ([100 * 1024 * MIB], 4),
        ([0, 200 * MIB], 4),
    ],
)
def test_little_data_is_read_in_few_sessions_and_much_in_as_many_as_are_allowed(
    sizes: list[int], expected: int
) -> None:
    assert sessions(sizes, most=4, each=64 * MIB) == expected
    assert sessions(sizes, most=1, each=64 * MIB) == 1
