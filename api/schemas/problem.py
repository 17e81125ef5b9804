"""Errors, as RFC 9457 has them, with the words of the command line."""

from __future__ import annotations

from pydantic import Field

from api.schemas.base import Shape, example


class FieldProblem(Shape):
    """One thing that is wrong with a request or a file."""

    field: str = Field(description="Dotted name of the field; empty for the whole.")
    message: str
    file: str | None = None
    line: int | None = Field(None, description="In the file, from 1.")


class Problem(Shape):
    """What went wrong (`message`), the evidence (`detail`), and the next step (`hint`)."""

    model_config = example(
        {
            "type": "urn:backupd:problem:not-found",
            "title": "Not Found",
            "status": 404,
            "message": "there is no backup 20261121T020000Z-7f3a9c01",
            "detail": "",
            "hint": "`backupd backups` lists them",
            "errors": [],
        }
    )

    type: str = Field(description="A stable name: `urn:backupd:problem:` and a word.")
    title: str
    status: int = Field(ge=400, le=599)
    message: str = Field(description="One sentence, as the command line says it.")
    detail: str = Field(description="Evidence; may have several lines.")
    hint: str = Field(description="What to do next.")
    errors: list[FieldProblem] = Field(description="Everything that is wrong, where more can be said.")
    id: str | None = Field(None, description="Of an unforeseen error: the log of the service has it, too.")
