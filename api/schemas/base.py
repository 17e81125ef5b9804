"""What all shapes share: answers name every field they have, requests with an unknown field are refused. And the shapes
of errors (RFC 9457, with the words of the command line) and of health.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, date, datetime, timedelta
from itertools import pairwise
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from pydantic import AfterValidator, AwareDatetime, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo

from backupd.catalog.row_mapping import Span
from backupd.model.document import Document, entries

MOST = 1000
"""Items of a page of a list, at most."""
SHOWN = 100
"""Items of a page unless more or fewer are asked for."""

_LINE = r"^[^\u0000-\u001f\u007f-\u009f]+$"
_TEXT = r"^[^\u0000]*$"

Time = Annotated[str, Field(json_schema_extra={"format": "date-time"}, examples=["2026-11-21T09:41:03.250000Z"])]
"""RFC 3339, in UTC."""
_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}"
Name = Annotated[str, Field(pattern=f"{_NAME}$", examples=["shop-db1"])]
"""Of a server, destination or policy."""
Label = Annotated[str, Field(pattern=rf"{_NAME}=[A-Za-z0-9][A-Za-z0-9._-]{{0,62}}$", examples=["env=prod"])]
"""Of servers, as the configuration has it."""
LABELS = "Only those of servers with this label, KEY=VALUE. May be repeated: of servers with all of them."
CURSOR = re.compile(r"^[A-Za-z0-9._~:-]{1,200}$")
Cursor = Annotated[str, Field(pattern=CURSOR.pattern)]
"""Where the next page of a list begins."""
Line = Annotated[str, Field(pattern=_LINE, max_length=500)]
"""Words of a person on one line."""
Text = Annotated[str, Field(pattern=_TEXT)]
"""Any text that a database can keep."""
Folder = Annotated[str, Field(pattern=r"^/[^\u0000]*$", max_length=4000, examples=["/srv/restored"])]
"""An absolute path on the host of backupd."""


_NUMBER = re.compile(r"[-+]?[\d.]+(?:e[-+]?\d+)?", re.IGNORECASE)


def _in_utc(moment: datetime) -> datetime:
    try:
        return moment.astimezone(UTC)
    except OverflowError:
        raise ValueError("lies outside of the years 1 to 9999 of UTC") from None


def _written(value: object) -> object:
    """Pydantic takes a number for the seconds since 1970; the reference says that it is a time."""
    if isinstance(value, int | float) or (isinstance(value, str) and _NUMBER.fullmatch(value.strip())):
        raise ValueError("must be a time with an offset, such as 2026-11-21T10:00:00Z")
    return value


Moment = Annotated[AwareDatetime, AfterValidator(_in_utc), BeforeValidator(_written)]
"""One that somebody names, in any zone."""
Id = Annotated[str, Field(pattern=r"^[A-Za-z0-9-]{1,64}$", examples=["20261121T020000Z-7f3a9c01"])]


class Shape(BaseModel):
    """Part of an answer, as the reference describes it. The documents themselves are those of the application."""

    model_config = ConfigDict(extra="forbid", validate_by_name=True)


S = TypeVar("S", bound=Shape)
_SHAPES: dict[Any, Any] = {datetime: Time, timedelta: float, date: str}
"""What represents a type of the application in a shape."""


def of(record: Any) -> Callable[[type[S]], type[S]]:
    """The shape of the documents of ``record``: their keys, with the types of the fields, described by the docstrings
    below these. The class declares only what it knows more exactly."""

    def whole(shape: type[S]) -> type[S]:
        own = {field.alias or name: (name, field) for name, field in shape.model_fields.items()}
        types: dict[str, Any] = {}
        for key, hint, description in _keys(record):
            name, field = own.pop(key, (key, FieldInfo(annotation=hint)))
            types[name] = Annotated[field.annotation, Field(description=description), field]
        if own:
            raise TypeError(f"documents of {record.__name__} do not have {', '.join(own)}")
        kind: Any = type(shape)
        same = {name: getattr(shape, name) for name in ("__module__", "__qualname__", "__doc__", "model_config")}
        made: type[S] = kind(shape.__name__, shape.__bases__, {**same, "__annotations__": types})
        _SHAPES[record] = made
        return made

    return whole


def _keys(record: Any) -> Iterator[tuple[str, Any, str | None]]:
    """Key, type and description of whatever is in its documents."""
    hints, described = get_type_hints(record), _docstrings(record)
    for key, attribute, how in entries(record):
        made_by = vars(record)[attribute]
        if isinstance(made_by, property):
            hints[attribute] = get_type_hints(made_by.fget)["return"]
            described[attribute] = _line(made_by.__doc__ or "")
        hint = hints[attribute]
        if how.inline:
            yield from _keys(hint)
        else:
            yield key, _kind(hint) | None if how.or_null else _kind(hint), described.get(attribute)


def _kind(hint: Any) -> Any:
    """The type of what becomes of a value of this type in a document."""
    kinds = [_kind(part) for part in get_args(hint) if part not in (NoneType, Ellipsis)]
    origin: Any = get_origin(hint)
    if origin is UnionType:
        return kinds[0] | None
    if origin in (Mapping, dict):
        origin = dict
        return origin[kinds[0], kinds[1]]
    if origin is not None:
        origin = list
        return origin[kinds[0]]
    if issubclass(hint, Document) and hint not in _SHAPES:
        raise TypeError(f"there is no shape of {hint.__name__} yet")
    return _SHAPES.get(hint, hint)


def _docstrings(record: Any) -> dict[str, str | None]:
    """Of its attributes, each below its own."""
    described: dict[str, str | None] = {}
    for statements in pairwise(ast.walk(ast.parse(inspect.getsource(record)))):
        match statements:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                described[name] = _line(text)
    return described


def _line(docstring: str) -> str | None:
    return " ".join(docstring.replace("``", "`").split()) or None


class Asked(BaseModel):
    """Part of a request: of exactly these types, without anything else in it."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Query(BaseModel):
    """Parameters behind the ``?`` of an address; one that is not known is refused, not ignored."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class Page(Query):
    """Which part of a list. The address of the next part is in the header ``Link``."""

    limit: int = Field(SHOWN, ge=1, le=MOST, description="Maximum number of rows.")
    after: Cursor | None = Field(
        None,
        examples=["20261121T020000Z-7f3a9c01"],
        description="Cursor from the `Link` header of the previous page.",
    )


class Dated(Page):
    """Of what has a moment."""

    since: Moment | None = Field(None, examples=["2026-11-21T09:00:00Z"], description="Only entries from this time on.")
    until: Moment | None = Field(None, examples=["2026-11-21T10:00:00Z"], description="Only entries up to this time.")

    @property
    def span(self) -> Span:
        return Span(self.since, self.until)


class OfServer(Dated):
    """Of what belongs to a server."""

    server: Name | None = Field(None, description="Only those of this server.")
    label: list[Label] = Field([], max_length=20, description=LABELS)


class Whole(Query):
    """A list that is told whole, unless a part of it is asked for. The address of the next part is in the header
    ``Link``."""

    limit: int | None = Field(None, ge=1, le=MOST, description="Maximum number of rows. Default: all.")
    after: Cursor | None = Field(None, description="Cursor from the `Link` header of the previous page.")


class Rated(Whole):
    """The same of what has a status."""

    status: Literal["good", "warning", "bad"] | None = Field(None, description="Only those in this state.")
    label: list[Label] = Field([], max_length=20, description=LABELS)


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
    errors: list[FieldProblem] = Field(description="Every single problem, if there are several.")
    id: str | None = Field(None, description="Of an unforeseen error: the log of the service has it, too.")


class Alive(Shape):
    """The process answers."""

    status: str = Field(description="Always `ok`.")


class Ready(Shape):
    """Whether backups are taken and can be asked for, and what is in the way of it."""

    ready: bool
    reasons: list[str] = Field(description="Empty when it is ready.")


class Presence(Shape):
    """Whether a database server takes its part, for load balancers: a backup may take it out of rotation."""

    server: str
    present: bool
    reason: str = Field(description="Why not; empty when it is present.")
