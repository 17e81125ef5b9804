"""Restored tables take their place: from the staging schema to the names that they are wanted under.

Nothing is dropped: a table that is in the way is renamed aside. All tables change places by one RENAME TABLE, prepared
in the moment before under locks (``restore.swap``). What is going to happen is written into the staging schema first,
so that a hand-over that was killed between any two statements is finished by the next call, and every name means the
old table or the new one, whole, at any time.

To the foreign keys: the new table has those of its definition; those of other tables that referenced the old one
reference the new one; the old one has none, so that nobody's rows are held or changed for its sake. They are added
without looking at the rows, and afterwards rows without parents are counted in both directions. Triggers move in the
same way. Privileges, views and routines mean names, so they are as before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Event

from backupd.engine.client import Connection, Session
from backupd.engine.constraints import check_names
from backupd.engine.foreignkeys import ForeignKey, orphans
from backupd.engine.probe import flavour_of
from backupd.model.errors import BusyError, CancelledError, RefusedError, ServerError
from backupd.model.progress import Progress, Report, silent
from backupd.model.server import Flavour, Version
from backupd.model.table import quote_name
from restore.arrangement import read_keys
from restore.handovergoals import Goal, HandedOver, Patience, Saved, Triggers
from restore.handoverjournal import Entry, Journal
from restore.handoverplan import Plan, digest
from restore.handoverplanner import make_plan
from restore.swap import Place, Swap, prepare

__all__ = ["Goal", "HandedOver", "Patience", "Saved", "Triggers", "hand_over", "resume", "told"]

PHASE = "hand over"


def hand_over(connection: Connection, goals: Sequence[Goal], *, replace: bool, aside: str, report: Report = silent,
              triggers: Triggers = Triggers.BACKUP, collations: Mapping[str, str] | None = None,
              patience: Patience | None = None, cancel: Event | None = None) -> HandedOver:
    """Give every goal's staged table its target's name; all of them or none.

    ``replace``: tables that have these names may be renamed aside, to ``<name><aside>`` (shortened where that is too
    long). ``collations``: of schemas that are made because they are missing (else the staging schema's). A hand-over of
    the same tables that was interrupted is finished as it was begun; one that is finished tells its result again.

    Raises RefusedError, NotFoundError, UsageError before anything is changed; BusyError, CancelledError after
    everything was put back; ServerError: call again to finish.
    """
    if not goals:
        return HandedOver(())
    staging = goals[0].staged.schema
    key = digest((goal.staged, goal.target) for goal in goals)
    with _alone(connection, staging, patience or Patience()) as session:
        journal = Journal(session, staging)
        within = _renames_locked(session)
        work = _Work(connection, session, journal, within, patience or Patience(), report, cancel)
        entries = {entry.key: entry for entry in journal.entries()}
        known = entries.get(key)
        if known is not None and (known.result is None or work.is_over(known.plan)):
            return work.finish(known)
        if others := [entry for entry in entries.values() if entry.result is None]:
            names = ", ".join(move.target.shown for move in others[0].plan.moves)
            raise RefusedError(f"another hand-over out of {staging} is not finished: that of {names}",
                               hint="finish that one first")
        plan = make_plan(session, goals, replace_live=replace, aside=aside, triggers=triggers, within=within)
        _make_schemas(session, plan, collations or {})
        journal.create()
        journal.begin(key, plan)
        return work.finish(Entry(key, plan, None))


def resume(connection: Connection, staging: str, *, report: Report = silent, patience: Patience | None = None,
           cancel: Event | None = None) -> HandedOver | None:
    """Finish the hand-over out of the schema ``staging`` that was interrupted; None: there is none. Raises as
    ``hand_over``."""
    with _alone(connection, staging, patience or Patience()) as session:
        journal = Journal(session, staging)
        work = _Work(connection, session, journal, _renames_locked(session), patience or Patience(), report, cancel)
        waiting = [entry for entry in journal.entries() if entry.result is None]
        return work.finish(waiting[0]) if waiting else None


def told(connection: Connection, staging: str) -> HandedOver | None:
    """What the hand-over out of the schema ``staging`` that is finished came to; None: there is none. Raises
    ServerError."""
    with connection.connect() as session:
        done = [entry.result for entry in Journal(session, staging).entries() if entry.result is not None]
    return done[-1] if done else None


class _Work:
    def __init__(self, connection: Connection, session: Session, journal: Journal, within: bool, patience: Patience,
                 report: Report, cancel: Event | None) -> None:
        self._connection = connection
        self._session = session
        self._journal = journal
        self._within = within
        self._patience = patience
        self._report = report
        self._cancel = cancel

    def is_over(self, plan: Plan) -> bool:
        return self._swap(plan).place() is Place.DONE

    def finish(self, entry: Entry) -> HandedOver:
        if entry.result is not None:
            return entry.result
        swap = self._swap(entry.plan)
        try:
            self._rename_checks(entry.plan)
            problems = swap.run()
        except (BusyError, CancelledError):  # everything is as it was
            self._journal.forget(entry.key)
            raise
        result = self._result(entry.plan, problems)
        self._journal.finish(entry.key, result)
        return result

    def _swap(self, plan: Plan) -> Swap:
        return Swap(self._connection, self._session, plan, self._within, self._patience, self._step, self._cancel)

    def _step(self, what: str) -> None:
        self._report(Progress(PHASE, note=what))

    def _rename_checks(self, plan: Plan) -> None:
        for move in plan.moves:
            if not move.new_checks:
                continue
            present = {name.lower() for name in check_names(self._session, move.staged)}
            for name, clause in move.new_checks:
                if name.lower() in present:
                    self._step(f"another name for the check {name} of {move.target.shown}")
                    self._session.execute(f"ALTER TABLE {move.staged} DROP CHECK {quote_name(name)}, ADD {clause}")

    def _result(self, plan: Plan, problems: Sequence[str]) -> HandedOver:
        found = list(self._orphans(plan))
        return HandedOver(
            tables=tuple((move.target, move.aside) for move in plan.moves),
            warnings=(*plan.warnings, *problems, *found), orphans=tuple(found),
            saved=tuple(Saved(move.target, move.aside, move.saved) for move in plan.moves if move.aside))

    def _orphans(self, plan: Plan) -> Iterator[str]:
        """Looked for among the keys that are there: a missing one is told already."""
        tables = dict.fromkeys([move.target for move in plan.moves] + [key.child for key in plan.children])
        for table in tables:
            for key in read_keys(self._session, table):
                ours = any(plan.same(name, move.target) for move in plan.moves for name in (key.child, key.parent))
                if ours and (told := self._told(key)):
                    yield told

    def _told(self, key: ForeignKey) -> str:
        self._step(f"look for rows of {key.child.shown} without parents in {key.parent.shown}")
        try:
            lost = orphans(self._session, key)
        except ServerError as error:
            self._session.ping()
            return (f"rows of {key.child.shown} without parents in {key.parent.shown} were not looked for: "
                    f"{error.detail}")
        if not lost.rows:
            return ""
        sample = ", ".join(str(one[0] if len(one) == 1 else one) for one in lost.sample)
        why = "which is not there" if lost.missing else "which does not have those"
        return (f"{lost.rows} rows of {key.child.shown} ({', '.join(key.columns)}: {sample}"
                f"{', ...' if lost.rows > len(lost.sample) else ''}) reference rows of {key.parent.shown}, {why}: "
                f"foreign key {key.name}")


@contextmanager
def _alone(connection: Connection, staging: str, patience: Patience) -> Iterator[Session]:
    """A prepared session; nobody else hands over out of ``staging`` meanwhile."""
    with connection.connect() as session:
        prepare(session, patience.seconds)
        if not session.scalar("SELECT GET_LOCK(%s, 0)", Journal.lock_name(staging)):
            raise BusyError(f"somebody else hands over tables out of {staging}", hint="wait until that is done")
        yield session


def _renames_locked(session: Session) -> bool:
    """Does the server rename tables that the same session has locked? MySQL does from 8.0.13 on, MariaDB does not."""
    version, comment = session.query("SELECT @@GLOBAL.version, @@GLOBAL.version_comment")[0]
    return (flavour_of(str(version), str(comment)) is not Flavour.MARIADB
            and Version.parse(str(version)) >= Version(8, 0, 13))


def _make_schemas(session: Session, plan: Plan, collations: Mapping[str, str]) -> None:
    present = {str(name): str(collation) for name, collation in session.query(
        "SELECT SCHEMA_NAME, DEFAULT_COLLATION_NAME FROM information_schema.SCHEMATA")}
    for move in plan.moves:
        schema = move.target.schema
        if schema not in present and (not plan.folded or schema.lower() not in present):
            collation = collations.get(schema) or present[move.staged.schema]
            if not collation.replace("_", "").isalnum():
                raise RefusedError(f"{collation!r} is no collation")
            session.execute(f"CREATE DATABASE IF NOT EXISTS {quote_name(schema)} "
                            f"CHARACTER SET {collation.partition('_')[0]} COLLATE {collation}")
            present[schema] = collation
