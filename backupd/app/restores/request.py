"""What somebody wants restored, as one value that can be kept, shown, and asked for again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

from backupd.app.restores.table_sources import TableWishes
from backupd.app.restores.whole_server import Wishes
from backupd.model.errors import UsageError
from restore.planning.target import parse_target

TABLES = "tables"
MODES = ("new-server", "replica", TABLES)
TRIGGERS = ("backup", "live", "none")
_METHODS = ("applier", "pipe")
_SOURCES = ("logical", "physical")
_NAMES = {"rename": "as", "exclude": "exclude_gtid"}
"""Fields that are called otherwise outside of Python."""
_OF_TABLES = ("tables", "into", "rename", "sql", "compare", "source")
_OF_WHOLE = ("datadir", "start", "replay_with")


@dataclass(frozen=True, slots=True)
class RestoreRequest:
    """A whole server goes into the folder ``datadir`` (``mode`` new-server or replica), tables (``mode`` tables) into
    the running server ``into`` or as files into the folder ``sql``. Empty: not said. ``rename``: other names for the
    tables; ``compare``: only show how they differ; ``source``: out of which sort of backup; ``thaw``: the tier;
    ``accept_older``: the newest moment, although something later is known to exist; ``accept_inexact``: a
    replay that may give other rows."""

    server: str
    target: str
    mode: str = MODES[0]
    datadir: str = ""
    start: bool = False
    tables: tuple[str, ...] = ()
    into: str = ""
    rename: str = ""
    sql: str = ""
    compare: bool = False
    triggers: str = TRIGGERS[0]
    exclude: tuple[str, ...] = ()
    replay_with: str = ""
    thaw: str = ""
    source: str = ""
    accept_older: bool = False
    accept_inexact: bool = False

    @property
    def of_tables(self) -> bool:
        return self.mode == TABLES

    @property
    def replaces_live(self) -> bool:
        """Is something in a running server made or changed?"""
        return bool(self.into) and not self.compare

    @property
    def wishes(self) -> Wishes:
        """Raises UsageError."""
        return Wishes.of(
            self.exclude,
            self.replay_with or None,
            self.thaw or None,
            accept_older=self.accept_older,
            accept_inexact=self.accept_inexact,
        )

    @property
    def table_wishes(self) -> TableWishes:
        """Raises UsageError."""
        wishes = Wishes.of(
            self.exclude, None, self.thaw or None, accept_older=self.accept_older, accept_inexact=self.accept_inexact
        )
        return TableWishes.of(self.tables, self.rename or None, wishes, self.source or None)

    def check(self) -> None:
        """Raises UsageError with everything that is wrong with it, as far as the words themselves tell. Where they go
        is not asked for: a plan can do without."""
        problems = [*self._unknown(), *self._mixed()]
        for look in (
            lambda: parse_target(self.target),
            lambda: self.wishes,
            lambda: self.table_wishes if self.of_tables and self.tables else None,
        ):
            try:
                look()
            except UsageError as error:
                problems.append(": ".join(filter(None, (error.message, error.detail))))
            except ValueError:
                continue  # a method or a source that there is not, which was said already
        if problems:
            raise UsageError(
                "this restore cannot be asked for",
                detail="\n".join(problems),
                hint="a target is latest, a time with its offset, gtid:..., before-gtid:..., file:pos or "
                "backup:ID; a whole server needs datadir, tables need into or sql",
            )

    def check_place(self) -> None:
        """Raises UsageError where it does not say where to."""
        if not self.of_tables and not self.datadir:
            raise UsageError("where to? datadir is missing", hint="name an empty folder of the host of this service")
        if self.of_tables and not (self.into or self.sql):
            raise UsageError(
                "where to? The tables need either into or sql",
                hint="into: the name of a running server; sql: a new folder for files",
            )

    def as_json(self) -> dict[str, Any]:
        """Without what is not said."""
        document = {}
        for one in fields(self):
            value = getattr(self, one.name)
            if value != one.default:
                document[_NAMES.get(one.name, one.name)] = list(value) if isinstance(value, tuple) else value
        return document | {"mode": self.mode}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Raises UsageError for names and types that do not belong there."""
        known = {_NAMES.get(one.name, one.name): one for one in fields(cls)}
        values: dict[str, Any] = {}
        problems = [f"{name}: is missing" for name in ("server", "target") if not document.get(name)]
        for name, value in document.items():
            one = known.get(name)
            if one is None:
                problems.append(f"{name[:80]}: is not known")
            elif value is None:
                continue
            elif (found := _value(one.default, value)) is None:
                problems.append(f"{name}: has the wrong type")
            else:
                values[one.name] = found
        if problems:
            raise UsageError("this restore cannot be asked for", detail="\n".join(problems))
        return cls(**values)

    def _unknown(self) -> list[str]:
        words = (
            ("mode", self.mode, MODES),
            ("triggers", self.triggers, TRIGGERS),
            ("replay_with", self.replay_with, ("", *_METHODS)),
            ("source", self.source, ("", *_SOURCES)),
        )
        found = [
            f"{name}: {value[:80]!r} is not one of {', '.join(filter(None, allowed))}"
            for name, value, allowed in words
            if value not in allowed
        ]
        found += [
            f"{name}: must be an absolute path"
            for name, text in (("datadir", self.datadir), ("sql", self.sql))
            if text and not _is_absolute(text)
        ]
        return found

    def _mixed(self) -> list[str]:
        apart = _OF_WHOLE if self.of_tables else _OF_TABLES
        whose = "a whole server" if self.of_tables else "tables"
        found = [f"{_NAMES.get(name, name)}: only for {whose}" for name in apart if getattr(self, name)]
        if self.of_tables and not self.tables:
            found.append("tables: no table is named")
        if self.into and self.sql:
            found.append("sql: not together with into")
        if self.sql and (self.rename or self.compare):
            found.append("as, compare: not with sql, which touches no server")
        return found


def _is_absolute(text: str) -> bool:
    return "\0" not in text and "\n" not in text and Path(text).is_absolute() and ".." not in Path(text).parts


def _value(default: object, value: object) -> object:
    """As the field holds it; None for another type. A field without a default is a text."""
    if isinstance(default, tuple):
        good = isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)
        return tuple(value) if good and isinstance(value, list | tuple) else None
    if isinstance(default, bool):
        return value if isinstance(value, bool) else None
    return value if isinstance(value, str) else None
