"""Shapes of health."""

from __future__ import annotations

from pydantic import Field

from api.schemas.base import Shape, example


class Alive(Shape):
    """The process answers."""

    model_config = example({"status": "ok"})

    status: str = Field(description="Always `ok`.")


class Ready(Shape):
    """Whether backups are taken and can be asked for, and what is in the way of it."""

    model_config = example({"ready": False, "reasons": ["no service follows the policies: nothing starts by itself"]})

    ready: bool
    reasons: list[str] = Field(description="Empty when it is ready.")


class Presence(Shape):
    """Whether a database server takes its part, for load balancers: a backup may take it out of rotation."""

    model_config = example(
        {
            "server": "shop-db1",
            "present": False,
            "reason": "a backup has taken it out of rotation since 2026-11-21T02:00:00.000000Z",
        }
    )

    server: str
    present: bool
    reason: str = Field(description="Why not; empty when it is present.")
