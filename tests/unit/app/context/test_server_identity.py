"""When the stream of another server shows that it took over from the one before."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from backupd.app.context.server_identity import took_over
from backupd.model.binlog import Branch, BranchReason
from backupd.model.server_facts import Position

FORK = Position("binlog.000001", 1477, "0-1-8")


@pytest.mark.parametrize(
    ("reason", "fork", "uuid", "is_at_home", "expected"),
    [
        (BranchReason.FAILOVER, FORK, "B", False, True),
        (BranchReason.FAILOVER, None, "B", True, False),
        (BranchReason.FAILOVER, FORK, "A", True, False),
        # Two servers of one image, with one server_id: their logs are equal up to the place where they part.
        (BranchReason.LOST_TAIL, FORK, "B", False, False),
        # It crashed, and calls itself something else since.
        (BranchReason.LOST_TAIL, FORK, "B", True, True),
    ],
)
def test_only_a_failover_from_a_known_place_takes_over(
    reason: BranchReason, fork: Position | None, uuid: str, *, is_at_home: bool, expected: bool
) -> None:
    branch = Branch(
        server="shop",
        id="b",
        noticed_at=datetime(2026, 11, 22, tzinfo=UTC),
        reason=reason,
        server_uuid="B",
        flavour="mariadb",
        basename="binlog",
        first_number=1,
        parent="a",
        fork=fork,
    )
    assert took_over(branch, uuid, is_at_home=is_at_home) is expected
