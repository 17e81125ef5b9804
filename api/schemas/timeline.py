"""Which moments of a server can be had again."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from api.schemas.backups import Position
from api.schemas.base import Shape, Time, example
from api.schemas.proofs import PROOF, Proof

_PLACE: dict[str, Any] = {"file": "mysql-bin.000042", "pos": 4711, "gtid": "0-1-1099"}
TIMELINE: dict[str, Any] = {
    "server": "shop-db1",
    "at": "2026-11-21T09:41:10Z",
    "windows": [
        {
            "from": "2026-11-14T02:07:12Z",
            "to": "2026-11-21T09:41:03Z",
            "reason_end": "the newest that is there",
            "branch": "20261101T000000Z-11223344",
            "base": "20261114T020000Z-99887766",
            "destinations": ["local"],
            "conditions": [],
        }
    ],
    "gaps": [
        {
            "after": _PLACE,
            "before": {**_PLACE, "pos": 9000},
            "reason": "the server had purged it",
            "from": "2026-11-10T01:00:00Z",
            "to": "2026-11-10T03:00:00Z",
            "branch": "20261101T000000Z-11223344",
            "destination": "",
        }
    ],
    "latest": "2026-11-21T09:41:03Z",
    "tables_only": False,
    "first_due": None,
    "warnings": [],
    "destinations": [
        {"name": "local", "latest": "2026-11-21T09:41:03Z", "behind_seconds": 0.0, "rpo_seconds": 7.0, "trouble": ""}
    ],
    "branches": [
        {
            "id": "20261101T000000Z-11223344",
            "reason": "first",
            "from": "2026-11-01T00:00:00Z",
            "to": None,
            "parent": "",
            "fork": None,
        }
    ],
    "last_proof": PROOF,
    "objectives": {
        "rpo": 60.0,
        "rto": 7200.0,
        "achieved_rpo": 7.0,
        "predicted_rto": 340.0,
        "rpo_kept": True,
        "rto_kept": True,
        "kept": True,
    },
}


class Window(Shape):
    """Every moment from one to the other can be restored; one moment where both are the same."""

    from_: Time = Field(alias="from")
    to: Time
    reason_end: str
    branch: str
    base: str = Field(description="The backup that a restore to it begins with.")
    destinations: list[str]
    conditions: list[str] = Field(description="What makes it doubtful.")


class Gap(Shape):
    """Binary logs that are not there: nothing inside can be replayed."""

    after: Position
    before: Position | None
    reason: str
    from_: Time | None = Field(alias="from")
    to: Time | None
    branch: str
    destination: str = Field(description="Empty: at no destination.")


class Reach(Shape):
    """How far the copies of one destination reach."""

    name: str
    latest: Time | None
    behind_seconds: float | None
    rpo_seconds: float | None
    trouble: str


class Branch(Shape):
    """A server's history forks at each restore."""

    id: str
    reason: str
    from_: Time = Field(alias="from")
    to: Time | None
    parent: str | None
    fork: Position | None


class Objectives(Shape):
    """Seconds: what the policy allows and what is so; null where nobody knows, or nothing was asked for."""

    rpo: float | None
    rto: float | None
    achieved_rpo: float | None
    predicted_rto: float | None
    rpo_kept: bool | None
    rto_kept: bool | None
    kept: bool


class Timeline(Shape):
    """What of a server can be had again, what interrupts it, and whether its objectives are kept."""

    model_config = example(TIMELINE)

    server: str
    at: Time
    windows: list[Window]
    gaps: list[Gap]
    latest: Time | None
    tables_only: bool = Field(
        description="Only dumps are taken of it: the moments are those of tables, and the server "
        "as a whole cannot be restored."
    )
    first_due: Time | None = Field(description="There is no backup, and none was due yet: the first one starts then.")
    warnings: list[str]
    destinations: list[Reach]
    branches: list[Branch]
    last_proof: Proof | None
    objectives: Objectives
