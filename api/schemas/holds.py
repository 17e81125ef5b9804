"""Holds and pauses: nothing is deleted, nothing starts by itself."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from api.schemas.base import Asked, Line, Query, Shape, Time, example

Whom = Annotated[
    str,
    Field(
        pattern=r"^(\*|[A-Za-z0-9][A-Za-z0-9._-]{0,62})$",
        examples=["shop-db1"],
        description="A server; `*` for every one.",
    ),
]
_HOLD: dict[str, Any] = {
    "server": "shop-db1",
    "kind": "hold",
    "reason": "audit until March",
    "by": "anna",
    "since": "2026-11-21T12:00:00Z",
}


class Hold(Shape):
    """A hold (nothing of the server is deleted) or a pause (no job of it starts by itself)."""

    model_config = example(_HOLD)

    server: str
    kind: str = Field(pattern="^(hold|pause)$")
    reason: str
    by: str
    since: Time


class HoldRequest(Asked):
    model_config = example({"server": "shop-db1", "reason": "audit until March"})

    server: Whom
    reason: Line


class PauseRequest(HoldRequest):
    model_config = example({"server": "shop-db1", "reason": "moving the data centre", "stop_running": False})

    stop_running: bool = Field(False, description="And stop what runs or waits.")


class Held(Hold):
    """`problems`: destinations that could not be told, with why."""

    model_config = example({**_HOLD, "problems": []})

    problems: list[str]


class Paused(Hold):
    """`stopped`: jobs that were asked to stop; `problems`: those that could not be."""

    model_config = example({**_HOLD, "kind": "pause", "stopped": [], "problems": []})

    stopped: list[str]
    problems: list[str]


class ReleaseQuery(Query):
    server: Whom


class Released(Shape):
    """`problems`: destinations where it may still be written."""

    model_config = example({"server": "shop-db1", "kind": "hold", "released": True, "problems": []})

    server: str
    kind: str
    released: bool
    problems: list[str]
