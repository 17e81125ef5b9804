"""What all shapes share: answers name every field they have, requests are refused for one that is not known."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict, Field

from backupd.catalog.base.pages import Span

MOST = 1000
"""Items of a page of a list, at most."""
SHOWN = 100
"""Items of a page unless more or fewer are asked for."""

_LINE = r"^[^\u0000-\u001f\u007f-\u009f]+$"
_TEXT = r"^[^\u0000]*$"

Time = Annotated[str, Field(json_schema_extra={"format": "date-time"}, examples=["2026-11-21T09:41:03.250000Z"])]
"""RFC 3339, in UTC."""
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
    """Part of an answer."""

    model_config = ConfigDict(extra="forbid")


class Asked(BaseModel):
    """Part of a request: of exactly these types, without anything else in it."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Query(BaseModel):
    """Parameters behind the ``?`` of an address; one that is not known is refused, not ignored."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class Page(Query):
    """Which part of a list. The address of the next part is in the header ``Link``."""

    limit: int = Field(SHOWN, ge=1, le=MOST, description="At most so many.")
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
    limit: int | None = Field(None, ge=1, le=MOST, description="At most so many; without it all.")
    after: Name | None = Field(None, description="Where the page before ended, as its `Link` header says.")


def example(document: dict[str, Any], *more: dict[str, Any]) -> ConfigDict:
    """For ``model_config``: documents that the reference shows."""
    return ConfigDict(json_schema_extra={"examples": [document, *more]})
