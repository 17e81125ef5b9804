"""What somebody wants restored: one record that the command line, REST and the page build, with the rules of what goes
together. It can be kept, shown, asked for again, and written as a command."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

from backupd.model.binlog import ReplayMethod
from backupd.model.errors import UsageError
from backupd.model.table import TablePattern
from backupd.model.text import parse_duration
from restore.planning.table_plan import Renaming, Source, TableGoal, Triggers
from restore.planning.target import one_gtid, parse_target

TABLES = "tables"
GALERA = "galera"
WHOLE_MODES = ("new-server", "replica", GALERA)
MODES = (*WHOLE_MODES, TABLES)
REPLICA = "replica"
_JSON_NAMES = {"rename": "as", "exclude": "exclude_gtid"}
"""Fields that have another name in JSON."""
_OPTION_NAMES = {"target": "--to", "source": "--from", "replicate_from": "--source"}
"""Fields whose command-line option is not their JSON name."""
_OF_TABLES = ("tables", "into", "rename", "sql", "compare", "confirm", "keys", "triggers", "source")
_OF_NODES = ("cluster", "allow_sst", "node")
"""Of a node of a cluster (mode galera)."""
_OF_REPLICA = ("replicate_from", "delay", "server_id")
"""Of a copy that is made a running replica."""
_OF_WHOLE = ("datadir", "start", "mode", "replay_with", *_OF_NODES, *_OF_REPLICA)
_OF_LIVE = ("rename", "compare", "confirm", "keys", "triggers")
"""Of tables that go into a running server."""
LARGEST_SERVER_ID = 2**32 - 1
_ADDRESS = re.compile(r"(?:\[(?P<six>[0-9A-Fa-f:.%]+)\]|(?P<host>[A-Za-z0-9._-]+))(?::(?P<port>[0-9]{1,5}))?")
_ALWAYS_SET = ("mode", "triggers")
"""Fields that always have a value: only the caller knows whether they were given."""


def json_name(name: str) -> str:
    """The name of a field in JSON and in forms: ``as`` for ``rename``."""
    return _JSON_NAMES.get(name, name)


def option_name(name: str) -> str:
    """The command-line option of a field: ``--exclude-gtid`` for ``exclude``."""
    return _OPTION_NAMES.get(name) or "--" + json_name(name).replace("_", "-")


@dataclass(frozen=True, slots=True)
class RestoreOptions:
    """How binary logs are replayed, and what is done about objects in archive classes.

    ``exclude``: GTIDs of transactions to leave out. ``replay_with``: the method, None for the planner's choice.
    ``thaw``: the tier to thaw at; "" thaws nothing. ``days``: how long thawed objects stay readable, 0 for the
    configured time. ``everywhere``: see ``with_thaw``. ``accept_older``: restore the newest moment that can be restored
    although something later is known to exist. ``accept_inexact``: replay statements that may give other rows than the
    source had."""

    exclude: tuple[str, ...] = ()
    replay_with: ReplayMethod | None = None
    thaw: str = ""
    days: int = 0
    everywhere: bool = False
    accept_older: bool = False
    accept_inexact: bool = False


DEFAULT_OPTIONS = RestoreOptions()


@dataclass(frozen=True, slots=True)
class TableOptions:
    """Which tables are restored. ``tables``: patterns. ``renaming``: their new names, None for their own. ``options``:
    how binary logs are replayed. ``source``: the kind of backup they are taken out of, None for the planner's
    choice."""

    tables: tuple[TablePattern, ...]
    renaming: Renaming | None = None
    options: RestoreOptions = DEFAULT_OPTIONS
    source: Source | None = None

    @classmethod
    def of(
        cls,
        tables: Sequence[str],
        rename: str | None,
        options: RestoreOptions = DEFAULT_OPTIONS,
        source: str | None = None,
    ) -> TableOptions:
        """Raises UsageError with everything that is wrong."""
        patterns, problems = [], []
        for text in tables:
            try:
                patterns.append(TablePattern.parse(text))
            except ValueError as error:
                problems.append(str(error))
        renaming = None
        try:
            renaming = Renaming.parse(rename) if rename is not None else None
        except UsageError as error:
            problems.append(f"{error.message} ({error.hint})")
        if not tables:
            problems.append("no tables given")
        if problems:
            raise UsageError(
                "these tables cannot be restored",
                detail="\n".join(problems),
                hint="--tables shop.orders, --tables 'shop.*'",
            )
        return cls(tuple(patterns), renaming, options, Source(source) if source is not None else None)

    def whole_schemas(self, found: Sequence[TableGoal]) -> tuple[str, ...]:
        """Schemas of which every table is restored under the schema's own name: their views, routines, triggers and
        events are restored as well."""
        from backupd.engine.sql.tables import SYSTEM_SCHEMAS

        moved = {goal.source.schema for goal in found if goal.source.schema != goal.target.schema}
        return tuple(
            schema
            for schema in sorted({goal.source.schema for goal in found} - moved - set(SYSTEM_SCHEMAS))
            if any(pattern.takes_all_of(schema) for pattern in self.tables)
        )


@dataclass(frozen=True, slots=True)
class RestoreRequest:
    """A whole server goes into the folder ``datadir`` (``mode`` new-server, replica, or galera: a node that comes back
    to its ``cluster``, by ``allow_sst`` also as a full copy of a donor; ``node``: which member of a group), tables
    (``mode`` tables) into the running server ``into`` or as SQL files into the folder ``sql``. Empty: not given.

    ``rename``: other names for the tables. ``compare``: only show how they differ. ``source``: the kind of backup they
    are taken out of. ``thaw``: the tier. ``accept_older``, ``accept_inexact``: see ``RestoreOptions``.

    ``replicate_from``: the source that a copy in mode replica follows, by its name in the configuration or as
    host:port; ``delay``: how long it stays behind, a duration; ``server_id``: the replica's, 0 for one that is free.
    """

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
    triggers: str = Triggers.BACKUP.value
    exclude: tuple[str, ...] = ()
    replay_with: str = ""
    thaw: str = ""
    source: str = ""
    accept_older: bool = False
    accept_inexact: bool = False
    replicate_from: str = ""
    delay: str = ""
    server_id: int = 0
    cluster: str = ""
    allow_sst: bool = False
    node: str = ""

    @property
    def of_node(self) -> bool:
        """Does a node come back to its cluster?"""
        return self.mode == GALERA

    @property
    def of_tables(self) -> bool:
        """Are tables restored, and not a whole server?"""
        return self.mode == TABLES

    @property
    def replaces_live(self) -> bool:
        """Is something in a running server made or changed?"""
        return bool(self.into) and not self.compare

    @property
    def folder(self) -> str:
        """The folder that is written to; "" for tables that go into a running server."""
        return self.sql or self.datadir

    @property
    def options(self) -> RestoreOptions:
        """Raises UsageError for what is not the GTID of one transaction."""
        return RestoreOptions(
            tuple(dict.fromkeys(one_gtid(text) for text in self.exclude)),
            ReplayMethod(self.replay_with) if self.replay_with else None,
            self.thaw,
            accept_older=self.accept_older,
            accept_inexact=self.accept_inexact,
        )

    @property
    def table_options(self) -> TableOptions:
        """Raises UsageError for patterns, names and GTIDs that are none."""
        options = replace(self, replay_with="").options
        return TableOptions.of(self.tables, self.rename or None, options, self.source or None)

    def check(self) -> None:
        """Raises UsageError with everything that is wrong with it, as far as its own fields show. What it is restored
        into may be left out: a plan needs none."""
        problems = [*self._unknown(), *self.mixed()]
        for read in (
            lambda: parse_target(self.target),
            lambda: self.options,
            lambda: self.table_options if self.of_tables and self.tables else None,
        ):
            try:
                read()
            except UsageError as error:
                problems.append(": ".join(filter(None, (error.message, error.detail))))
            except ValueError:
                continue  # an unknown method or source, which is among the problems already
        if problems:
            raise UsageError(
                "this restore request is not valid",
                detail="\n".join(problems),
                hint="a target is latest, a time with its offset, gtid:..., before-gtid:..., file:pos or "
                "backup:ID; a whole server needs datadir, tables need into or sql",
            )

    def mixed(self, name: Callable[[str], str] = json_name, *, said: Collection[str] = ()) -> list[str]:
        """What does not go together, a sentence each. ``name``: gives the name of a field where the request comes from.
        ``said``: what was given although no field shows that: ``mode``, ``triggers``, and ``confirm`` and ``keys``,
        which the command line alone has."""
        given = [
            one
            for one in (*_OF_WHOLE, *_OF_TABLES)
            if one in said or (one not in _ALWAYS_SET and getattr(self, one, None))
        ]
        apart, whose = (_OF_WHOLE, "a whole server") if self.of_tables else (_OF_TABLES, "tables")
        found = [f"{name(one)}: only for {whose}" for one in given if one in apart]
        if self.of_node:
            found += self._not_for_nodes(name)
        else:
            found += [f"{name(one)}: only with mode {GALERA}" for one in given if one in _OF_NODES and one not in apart]
        if self.of_tables and not self.tables:
            found.append(f"{name('tables')}: no tables given")
        of_replica = [name(one) for one in given if one in _OF_REPLICA]
        if of_replica and not self.of_tables and self.mode != REPLICA:
            found.append(f"{', '.join(of_replica)}: only with {name('mode')} {REPLICA}")
        elif of_replica and not self.of_tables and not self.replicate_from:
            found.append(f"{', '.join(of_replica)}: only with {name('replicate_from')}, the source to replicate from")
        found += self._of_replica(name)
        if self.into and self.sql:
            found.append(f"{name('sql')}: not together with {name('into')}")
        if self.sql and (live := [name(one) for one in given if one in _OF_LIVE]):
            found.append(f"{', '.join(live)}: not with {name('sql')}, which touches no server")
        return found

    def _not_for_nodes(self, name: Callable[[str], str]) -> Iterator[str]:
        if not self.cluster:
            yield f"{name('cluster')}: mode {GALERA} needs the name of the node's cluster"
        kind, _, branch = self.target.partition("@")
        if not (kind == "latest" or kind.startswith("backup:")) or branch:
            yield f"{name('target')}: a node comes back from latest or from backup:ID; the cluster brings it further"
        if self.exclude:
            yield f"{name('exclude')}: what the cluster has executed cannot be left out on one node"
        for given in ("accept_older", "accept_inexact"):
            if getattr(self, given):
                yield f"{name(given)}: a node has the same rows as its cluster, or it must not join: use backup:ID"
        if self.allow_sst and not self.start:
            yield f"{name('allow_sst')}: only together with {name('start')}"

    def check_target_folder(self, name: Callable[[str], str] = json_name) -> None:
        """Raises UsageError where neither a folder nor a server to restore into is given. ``name``: see ``mixed``."""
        if not self.of_tables and not self.datadir:
            raise UsageError(
                "no data directory given",
                hint=f"add {name('datadir')} with an empty folder on the host of the service",
            )
        if self.of_tables and not (self.into or self.sql):
            raise UsageError(
                f"no target given: tables need either {name('into')} or {name('sql')}",
                hint="into: the name of a running server; sql: a new folder for files",
            )

    @property
    def delay_seconds(self) -> int:
        """Raises ValueError for what is no duration."""
        return round(parse_duration(self.delay).total_seconds()) if self.delay else 0

    def command(self) -> str:
        """The shell command that asks for the same, with the confirmation that it needs."""
        words = ["backupd", "restore", self.server]
        for one in fields(self):
            value = getattr(self, one.name)
            unfit = one.name == ("mode" if self.of_tables else "triggers")
            if one.name == "server" or value == one.default or unfit:
                continue
            option = option_name(one.name)
            if value is True:
                words.append(option)
            else:
                texts = value if isinstance(value, tuple) else (str(value),)
                words += [word for text in texts for word in (option, text)]
        return shlex.join([*words, *(("--confirm", self.into) if self.replaces_live else ())])

    def alone(self) -> Self:
        """Without the fields of the other sort of restore."""
        apart = [one for one in (_OF_WHOLE if self.of_tables else _OF_TABLES) if one != "mode"]
        defaults: dict[str, Any] = {one.name: one.default for one in fields(self) if one.name in apart}
        return replace(self, **defaults)

    def as_json(self) -> dict[str, Any]:
        """By JSON name, without the fields that have their default; ``mode`` always."""
        document = {}
        for one in fields(self):
            value = getattr(self, one.name)
            if value != one.default:
                document[json_name(one.name)] = list(value) if isinstance(value, tuple) else value
        return document | {"mode": self.mode}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Of a document as ``as_json`` makes it. Raises UsageError for unknown names and wrong types."""
        known = {json_name(one.name): one for one in fields(cls)}
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
            raise UsageError("this restore request is not valid", detail="\n".join(problems))
        return cls(**values)

    def _unknown(self) -> list[str]:
        words = (
            ("mode", self.mode, MODES),
            ("triggers", self.triggers, tuple(Triggers)),
            ("replay_with", self.replay_with, ("", *ReplayMethod)),
            ("source", self.source, ("", *Source)),
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

    def _of_replica(self, name: Callable[[str], str]) -> Iterator[str]:
        """What is no server id, duration or address."""
        if not 0 <= self.server_id <= LARGEST_SERVER_ID:
            yield f"{name('server_id')}: {self.server_id} is not between 1 and {LARGEST_SERVER_ID}"
        for field, read in (
            ("delay", lambda: self.delay_seconds),
            ("replicate_from", lambda: source_address(self.replicate_from)),
        ):
            try:
                read()
            except ValueError as error:
                yield f"{name(field)}: {error}"


def source_address(text: str) -> tuple[str, int]:
    """Host and port of ``HOST``, ``HOST:PORT`` or ``[IPV6]:PORT``. Raises ValueError."""
    if not text:
        return "", 0
    from backupd.engine.sql.client import DEFAULT_PORT

    match = _ADDRESS.fullmatch(text)
    port = int(match["port"] or DEFAULT_PORT) if match else 0
    if match is None or not 0 < port < 65536:
        raise ValueError(f"{text[:80]!r} is neither the name of a server nor host:port")
    return match["host"] or match["six"], port


def _is_absolute(text: str) -> bool:
    return "\0" not in text and "\n" not in text and Path(text).is_absolute() and ".." not in Path(text).parts


def _value(default: object, value: object) -> object:
    """As the field holds it; None for another type. A field without a default is a text."""
    if isinstance(default, tuple):
        good = isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)
        return tuple(value) if good and isinstance(value, list | tuple) else None
    if isinstance(default, int):
        return value if type(value) is type(default) else None
    return value if isinstance(value, str) else None
