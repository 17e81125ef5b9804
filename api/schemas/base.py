"""What all shapes share: answers name every field they have, requests with an unknown field are refused. And the shapes
of errors (RFC 9457, with the words of the command line) and of health.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, AwareDatetime, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from backupd.catalog.rows import Span
from backupd.model.text import format_time

MOST = 1000
"""Items of a page of a list, at most."""
SHOWN = 100
"""Items of a page unless more or fewer are asked for."""

_LINE = r"^[^\u0000-\u001f\u007f-\u009f]+$"
_TEXT = r"^[^\u0000]*$"

Time = Annotated[
    str,
    BeforeValidator(lambda moment: format_time(moment) if isinstance(moment, datetime) else moment),
    Field(json_schema_extra={"format": "date-time"}, examples=["2026-11-21T09:41:03.250000Z"]),
]
"""RFC 3339, in UTC. Made of a ``datetime``."""
Seconds = Annotated[
    float,
    BeforeValidator(lambda span: span.total_seconds() if isinstance(span, timedelta) else span),
    AfterValidator(lambda seconds: round(seconds, 3)),
]
"""A span of time, to the millisecond. Made of a ``timedelta`` or of seconds."""
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$", examples=["shop-db1"])]
"""Of a server, destination or policy."""
Line = Annotated[str, Field(pattern=_LINE, max_length=500)]
"""Words of a person on one line."""
Text = Annotated[str, Field(pattern=_TEXT)]
"""Any text that a database can keep."""
Folder = Annotated[str, Field(pattern=r"^/[^\u0000]*$", max_length=4000, examples=["/srv/restored"])]
"""An absolute path on the host of backupd."""


def _in_utc(moment: datetime) -> datetime:
    try:
        return moment.astimezone(UTC)
    except OverflowError:
        raise ValueError("lies outside of the years 1 to 9999 of UTC") from None


Moment = Annotated[AwareDatetime, AfterValidator(_in_utc)]
"""One that somebody names, in any zone."""
Id = Annotated[str, Field(pattern=r"^[A-Za-z0-9-]{1,64}$", examples=["20261121T020000Z-7f3a9c01"])]


class Shape(BaseModel):
    """Part of an answer. A value of the application that has no ``as_json`` is declared here alone: its attributes are
    the fields, where the names differ by ``validation_alias`` (which the reference does not show). A finished document
    fits, too."""

    model_config = ConfigDict(extra="forbid", from_attributes=True, validate_by_name=True)

    @model_validator(mode="before")
    @classmethod
    def _document(cls, value: Any) -> Any:
        """Values that say themselves what their document is."""
        return value.as_json() if hasattr(value, "as_json") else value

    @classmethod
    def document(cls, value: object) -> dict[str, Any]:
        """The JSON document of a value of the application: every field of the shape, in this order."""
        return cls.model_validate(value).model_dump(mode="json", by_alias=True)


class Asked(BaseModel):
    """Part of a request: of exactly these types, without anything else in it."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Query(BaseModel):
    """Parameters behind the ``?`` of an address; one that is not known is refused, not ignored."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class Page(Query):
    """Which part of a list. The address of the next part is in the header ``Link``."""

    limit: int = Field(SHOWN, ge=1, le=MOST, description="Maximum number of rows.")
    after: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9._~:-]{1,200}$",
        examples=["20261121T020000Z-7f3a9c01"],
        description="Where the page before ended, as its `Link` header says.",
    )


class Dated(Page):
    """Of what has a moment."""

    since: Moment | None = Field(None, examples=["2026-11-21T09:00:00Z"], description="Nothing from before.")
    until: Moment | None = Field(None, examples=["2026-11-21T10:00:00Z"], description="Nothing from after.")

    @property
    def span(self) -> Span:
        return Span(self.since, self.until)


class Whole(Query):
    """A list that is told whole, unless a part of it is asked for. The address of the next part is in the header
    ``Link``."""

    status: Literal["good", "warning", "bad"] | None = Field(None, description="Only those that stand so.")
    limit: int | None = Field(None, ge=1, le=MOST, description="Maximum number of rows; all of them without it.")
    after: Name | None = Field(None, description="Where the page before ended, as its `Link` header says.")


def example(document: dict[str, Any], *more: dict[str, Any]) -> ConfigDict:
    """For ``model_config``: documents that the reference shows."""
    return ConfigDict(json_schema_extra={"examples": [document, *more]})


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
