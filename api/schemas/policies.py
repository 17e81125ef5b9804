"""Policies: what they say, and what is wrong with them."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from api.schemas.base import Asked, Name, Shape, Text, example

_TEXT = 'physical: {full: "0 2 * * *"}\ndestinations: {required: [local]}\n'
_PROBLEM: dict[str, Any] = {"file": "gold.yaml", "line": 2, "field": "physical.ful", "message": "is not known here"}


class FileProblem(Shape):
    """One thing that is wrong in a file."""

    file: str
    line: int | None
    field: str
    message: str


class Policy(Shape):
    """A policy file, and the servers that follow it."""

    model_config = example(
        {
            "name": "gold",
            "file": "/etc/backupd/policies/gold.yaml",
            "servers": ["shop-db1"],
            "problems": [],
            "advice": [],
            "text": _TEXT,
            "in_force": True,
        }
    )

    name: str
    file: str
    servers: list[str]
    problems: list[FileProblem] = Field(description="While there are any, it is not followed.")
    advice: list[str]
    text: str = Field(description="The file as it is now.")
    in_force: bool = Field(description="The service follows it as it is now.")


class ValidationRequest(Asked):
    """The text of a policy file, in use or not yet."""

    model_config = example({"name": "gold", "text": _TEXT})

    name: Name = "policy"
    text: Text = Field(max_length=1_000_000)


class Validation(Shape):
    """Everything that is wrong with it, by line."""

    model_config = example({"valid": False, "problems": [_PROBLEM], "advice": []})

    valid: bool
    problems: list[FileProblem]
    advice: list[str]


class Reloaded(Shape):
    """The service was told; whether it took the files over is an event (`GET /v1/events`)."""

    model_config = example({"asked": True})

    asked: bool
