"""Who answers under a server's name."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

from backupd.model.clock import format_time

STRANGER = "another server answers under this name"
"""The reason of each backup that was taken of a stranger begins with it: a catalog that is made anew knows by it which
backups were kept apart."""


class Verdict(StrEnum):
    """``own``: the server itself, restored or upgraded or accepted by an operator too; ``failover``: another one, which
    holds what was archived last and goes on from there; ``stranger``: one of which nothing shows either."""

    OWN = "own"
    FAILOVER = "failover"
    STRANGER = "stranger"


@dataclass(frozen=True, slots=True)
class Identity:
    """A database server that answered under the name ``server``. ``uuid``: its ``server_uuid`` or ``server_uid``;
    ``server_id``: 0 where that is not known. ``evidence``: why the verdict, in words. ``since``: when it answered
    first, ``seen_at``: last. ``accepted_by``: the operator who accepted it, "" where nobody had to."""

    server: str
    uuid: str
    verdict: Verdict
    since: datetime
    seen_at: datetime
    server_id: int = 0
    evidence: str = ""
    address: str = ""
    accepted_by: str = ""

    @property
    def is_stranger(self) -> bool:
        return self.verdict is Verdict.STRANGER

    def as_json(self) -> dict[str, Any]:
        return {
            "server": self.server,
            "uuid": self.uuid,
            "verdict": str(self.verdict),
            "server_id": self.server_id,
            "evidence": self.evidence,
            "address": self.address,
            "since": format_time(self.since),
            "seen_at": format_time(self.seen_at),
            "accepted_by": self.accepted_by,
        }
