"""Scheduled events after a replay: enabled or not, as on the server whose logs were replayed.

A replication applier marks every event that a replayed CREATE EVENT or ALTER EVENT touches as disabled on a replica,
also one that was created DISABLE, so that nothing runs twice. A copy that takes the source's place needs the state that
the source had: it is what the statements said, on top of what the backup held. An event that reached the source itself
through replication was disabled there, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum

from backupd.engine.binlog.statements import kind_at
from backupd.engine.binlog.walk import Statement
from backupd.engine.server.probe import read_dialect
from backupd.engine.sql.client import Session
from backupd.engine.sql.dialect import Token, full_name, tokens_of, word_at
from backupd.model.table import quote_name


class EventState(StrEnum):
    """As the servers' tables of events have it (MySQL renamed the last)."""

    ENABLED = "ENABLED"
    DISABLED = "DISABLED"
    ELSEWHERE = "SLAVESIDE_DISABLED"
    """Disabled on a replica: it runs on the source."""


@dataclass(frozen=True, slots=True)
class Event:
    """``server_id``: of the server where its last statement ran."""

    schema: str
    name: str
    state: EventState
    server_id: int


Key = tuple[str, str]
"""Schema and name. Names of events know no case, so theirs is in lower case; that of the schema is, too, where the
server's names of schemas know none."""

_EVENT = frozenset({"EVENT"})
_IN_TABLE = "SELECT db, name, status, originator FROM mysql.event"
_IN_DICTIONARY = "SELECT EVENT_SCHEMA, EVENT_NAME, STATUS, ORIGINATOR FROM information_schema.EVENTS"
_ONCE_IN_TABLE = "SELECT db, name FROM mysql.event WHERE status = 'ENABLED' AND execute_at <= %s"  # in UTC
_ONCE_IN_DICTIONARY = (
    "SELECT EVENT_SCHEMA, EVENT_NAME FROM information_schema.EVENTS "
    "WHERE EVENT_TYPE = 'ONE TIME' AND STATUS = 'ENABLED' "
    "AND CONVERT_TZ(EXECUTE_AT, TIME_ZONE, '+00:00') <= %s"
)


def read_events(session: Session) -> dict[Key, Event]:
    """All events of a server. Raises ServerError."""
    folds, found = folds_schemas(session), {}
    listed = _IN_TABLE if read_dialect(session).has_events_in_table else _IN_DICTIONARY
    for schema, name, status, server_id in session.query(listed):
        state = EventState(status) if status in (EventState.ENABLED, EventState.DISABLED) else EventState.ELSEWHERE
        event = Event(str(schema), str(name), state, int(server_id))
        found[_key(event.schema, event.name, folds=folds)] = event
    return found


def folds_schemas(session: Session) -> bool:
    """Are `Shop` and `shop` the same schema to the server? Raises ServerError."""
    return int(session.query("SELECT @@lower_case_table_names")[0][0]) != 0


def after(before: Mapping[Key, Event], statements: Iterable[Statement], *, folds: bool) -> dict[Key, Event]:
    """The events that ``statements``, run one after the other on top of ``before``, touched and left. ``folds``: see
    ``folds_schemas``."""
    known = dict(before)
    touched: set[Key] = set()
    for statement in statements:
        tokens = _without_variables(list(tokens_of(statement.text)))
        verb = word_at(tokens, 0)
        if verb == "DROP" and word_at(tokens, 1) in ("DATABASE", "SCHEMA"):
            schema = _key(_name(tokens, _after_condition(tokens, 2))[0][1], "", folds=folds)[0]
            known = {key: event for key, event in known.items() if key[0] != schema}
        elif (at := kind_at(tokens, verb, _EVENT)) is not None:
            _apply(statement, tokens, at, known, touched, folds=folds)
    return {key: known[key] for key in touched if key in known}


@dataclass(frozen=True, slots=True)
class Settled:
    """``changed``: ``schema.name: state`` of each event whose state was changed. ``warnings``: in words."""

    changed: tuple[str, ...]
    warnings: tuple[str, ...]


def settle(
    session: Session,
    before: Mapping[Key, Event],
    wanted: Mapping[Key, Event],
    *,
    ran_until: datetime | None,
) -> Settled:
    """Give each event of ``wanted`` its state. One that the applier disabled though nothing in ``wanted`` accounts for
    it gets the state that it had ``before``, with a warning. One-time events whose time is before ``ran_until`` have
    run at the source, which disables or drops them then and logs neither: they are disabled (None: there are none).
    Raises ServerError."""
    given = {key: (event.state, event.server_id) for key, event in wanted.items()}
    present = read_events(session)
    restored, lost = [], []
    for key, now in sorted(present.items()):
        old = before.get(key)
        if now.state is not EventState.ELSEWHERE or key in given or (old and old.state is EventState.ELSEWHERE):
            continue
        if old is None:
            lost.append(f"{now.schema}.{now.name}")
        else:
            given[key] = old.state, old.server_id
            restored.append(f"{now.schema}.{now.name}: {old.state.lower()}")
    changed = _give(session, present, given)
    ran = _ran(session, ran_until) if ran_until else ()
    present = read_events(session)
    changed += _give(session, present, {key: (EventState.DISABLED, present[key].server_id) for key in ran})
    warnings = []
    if restored:
        warnings.append(
            "a statement that backupd cannot parse changed these scheduled events, so they keep their state from the "
            f"backup; compare them with the source: {', '.join(restored)}"
        )
    if lost:
        warnings.append(
            "these scheduled events are disabled, because the binary logs do not show whether they were enabled: "
            f"{', '.join(lost)} (to enable one: ALTER EVENT ... ENABLE)"
        )
    if ran:
        names = ", ".join(f"{present[key].schema}.{present[key].name}" for key in ran)
        warnings.append(
            f"these one-time events were due before the stop and are disabled, so that they do not run twice: {names}"
        )
    last = {line.rpartition(":")[0]: line for line in changed}
    return Settled(tuple(last.values()), tuple(warnings))


def disable_elsewhere(session: Session, source_id: int) -> tuple[str, ...]:
    """Disable every enabled event as on a replica, where it runs on the source, whose server id is ``source_id``; gives
    their names. Raises ServerError."""
    present = read_events(session)
    enabled = {key: event for key, event in present.items() if event.state is EventState.ENABLED}
    _give(session, present, dict.fromkeys(enabled, (EventState.ELSEWHERE, source_id)))
    return tuple(f"{event.schema}.{event.name}" for _key_of, event in sorted(enabled.items()))


def _give(
    session: Session, present: Mapping[Key, Event], wanted: Mapping[Key, tuple[EventState, int]]
) -> tuple[str, ...]:
    changed, in_table = [], read_dialect(session).has_events_in_table
    for key, (state, server_id) in sorted(wanted.items()):
        now = present.get(key)
        if now is None or now.state is state:
            continue
        if in_table:
            session.execute(
                "UPDATE mysql.event SET status = %s, originator = %s, modified = modified WHERE db = %s AND name = %s",
                str(state),
                server_id,
                now.schema,
                now.name,
            )
        else:
            _alter(session, now, state)
        changed.append(f"{now.schema}.{now.name}: {state.lower()}")
    return tuple(changed)


def _ran(session: Session, until: datetime) -> tuple[Key, ...]:
    """Enabled one-time events whose time was not after ``until``."""
    due = _ONCE_IN_TABLE if read_dialect(session).has_events_in_table else _ONCE_IN_DICTIONARY
    rows = session.query(due, until.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S"))
    folds = folds_schemas(session)
    return tuple(sorted(_key(str(schema), str(name), folds=folds) for schema, name in rows))


def _alter(session: Session, event: Event, state: EventState) -> None:
    """By statement, with all that it would otherwise take from this session."""
    row = session.records(
        "SELECT DEFINER, SQL_MODE, TIME_ZONE, CHARACTER_SET_CLIENT, COLLATION_CONNECTION "
        "FROM information_schema.EVENTS WHERE EVENT_SCHEMA = %s AND EVENT_NAME = %s",
        event.schema,
        event.name,
    )[0]
    user, _, host = str(row["DEFINER"]).rpartition("@")
    mode, zone = session.query("SELECT @@SESSION.sql_mode, @@SESSION.time_zone")[0]
    session.execute("SET SESSION sql_mode = %s, time_zone = %s", row["SQL_MODE"], row["TIME_ZONE"])
    word = {EventState.ENABLED: "ENABLE", EventState.DISABLED: "DISABLE"}.get(state, "DISABLE ON SLAVE")
    session.execute(
        f"ALTER DEFINER = {quote_name(user)}@{quote_name(host)} EVENT {quote_name(event.schema, event.name)} {word}"
    )
    session.execute("SET SESSION sql_mode = %s, time_zone = %s", mode, zone)


def _apply(
    statement: Statement, tokens: list[Token], at: int, known: dict[Key, Event], touched: set[Key], *, folds: bool
) -> None:
    verb = word_at(tokens, 0)
    (schema, name), at = _name(tokens, _after_condition(tokens, at + 1), statement.schema)
    key = _key(schema, name, folds=folds)
    if verb == "DROP":
        known.pop(key, None)
        return
    if verb == "CREATE" and key in known and word_at(tokens, 1) != "OR":
        return  # IF NOT EXISTS: nothing happened
    state, renamed = _clauses(tokens, at, statement.schema)
    old = known.pop(key, None)
    if not statement.own:
        state = EventState.ELSEWHERE
    elif state is None:
        state = old.state if old is not None and verb == "ALTER" else EventState.ENABLED
    schema, name = renamed or (schema, name)
    key = _key(schema, name, folds=folds)
    touched.add(key)
    known[key] = Event(schema, name, state, statement.server_id)


def _clauses(tokens: list[Token], at: int, current: str) -> tuple[EventState | None, tuple[str, str] | None]:
    """State and new name, as far as the statement says: its clauses end where the body begins."""
    state: EventState | None = None
    renamed: tuple[str, str] | None = None
    while at < len(tokens) and (word := word_at(tokens, at)) != "DO":
        if word == "ENABLE":
            state = EventState.ENABLED
        elif word == "DISABLE":
            state = EventState.ELSEWHERE if word_at(tokens, at + 1) == "ON" else EventState.DISABLED
        elif word == "RENAME" and word_at(tokens, at + 1) == "TO":
            renamed, at = _name(tokens, at + 2, current)
            continue
        at += 1
    return state, renamed


def _without_variables(tokens: list[Token]) -> list[Token]:
    """Without MariaDB's SET STATEMENT variable = value, ... FOR, where it stands in front."""
    if word_at(tokens, 0) != "SET" or word_at(tokens, 1) != "STATEMENT":
        return tokens
    at = next((at for at, token in enumerate(tokens) if token.word == "FOR"), len(tokens) - 1)
    return tokens[at + 1 :]


def _after_condition(tokens: list[Token], at: int) -> int:
    """Behind IF [NOT] EXISTS, where it is."""
    if word_at(tokens, at) != "IF":
        return at
    return at + (3 if word_at(tokens, at + 1) == "NOT" else 2)


def _name(tokens: list[Token], at: int, schema: str = "") -> tuple[tuple[str, str], int]:
    """As ``full_name``, also at the end of a statement that was cut."""
    return full_name(tokens, at, schema) if at < len(tokens) else ((schema, ""), at)


def _key(schema: str, name: str, *, folds: bool) -> Key:
    return schema.lower() if folds else schema, name.lower()
