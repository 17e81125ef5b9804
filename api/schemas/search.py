"""What the binary logs hold."""

from __future__ import annotations

from pydantic import Field

from api.schemas.base import MOST, Moment, Page, Shape, Text, Time, example
from backupd.model.binlog import ChangeKind


class SearchQuery(Page):
    """A transaction is found when it fits everything that is given."""

    table: list[Text] = Field(
        [], max_length=100, examples=[["shop.orders"]], description="Patterns of tables: schema.table, with * and ?."
    )
    kind: list[ChangeKind] = Field([], max_length=20, description="What was done to them.")
    since: Moment | None = Field(None, examples=["2026-11-21T09:00:00Z"])
    until: Moment | None = Field(None, examples=["2026-11-21T10:00:00Z"])
    gtid: Text | None = Field(None, max_length=200, examples=["0-1-1100"])
    branch: Text | None = Field(None, max_length=64, description="Only this branch of the server's history.")
    limit: int = Field(50, ge=1, le=MOST, description="At most so many.")


class Change(Shape):
    schema_: str = Field(alias="schema")
    table: str
    kind: ChangeKind
    rows: int


class Found(Shape):
    """A transaction. `restore_before`: the target of a restore to the moment right before it."""

    model_config = example(
        {
            "at": "2026-11-21T09:41:03.401000Z",
            "precise": True,
            "gtid": "0-1-1181",
            "file": "mysql-bin.000042",
            "pos": 91823,
            "end": 92110,
            "branch": "20261101T000000Z-11223344",
            "server_id": 1,
            "changes": [{"schema": "shop", "table": "orders", "kind": "delete", "rows": 4112}],
            "statement": None,
            "state": None,
            "restore_before": "before-gtid:0-1-1181",
        }
    )

    at: Time
    precise: bool
    gtid: str
    file: str
    pos: int
    end: int
    branch: str
    server_id: int
    changes: list[Change]
    statement: str | None
    state: str | None
    restore_before: str
