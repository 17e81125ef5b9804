"""A new replica out of a backup: resolved from configuration and catalog before a byte is moved.

To ``latest`` a backup does as it is where the source still has every transaction after it: it sends them itself, and
faster than a replay. Else archived binary logs are replayed to their end, and replication begins there.
"""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from backupd.app.binlogs.targets import history
from backupd.app.context.access import see
from backupd.app.context.settings import ServerSettings
from backupd.app.context.wiring import Wiring
from backupd.app.restores.plan import foresee, plan, sources
from backupd.app.restores.request import RestoreRequest, source_address
from backupd.engine.server.replication import Source
from backupd.engine.sql.client import Connection
from backupd.engine.sql.option_files import Tls
from backupd.model.access import Actor
from backupd.model.backup_record import BackupRecord
from backupd.model.errors import ConfigurationError, ForbiddenError, KeyUnusableError, Problem, RefusedError
from backupd.model.server_facts import Flavour
from backupd.recovery.runs import Histories
from restore.datadir.staging import read_marker
from restore.fetch.sources import load_chain
from restore.planning.plan import Plan, ReplicaPlan, Step
from restore.planning.target import Latest, parse_target
from restore.replica.hand_over import foreseen
from restore.replica.setup import ReplicaSpec, ReplicaState, state_of
from restore.replica.source import (
    ReplicaStart,
    Restored,
    SourceFacts,
    choose_server_id,
    read_source,
    refuse_other_branch,
    refuse_other_source,
)

_CATCH_UP = 0.1
"""How long a replica is assumed to need for a second of its source's work."""
_LOOPBACK = "127.0.0.1"


def planned_whole(wiring: Wiring, request: RestoreRequest, base: str | None = None) -> tuple[Plan, ReplicaSpec | None]:
    """The plan of a restore of a whole server; and what its copy becomes, where that is a replica of a source.

    ``base``: the backup to begin from, where that is decided. Raises what planning raises; RefusedError where the copy
    could not follow the source, ServerError where that cannot be asked, ConfigurationError.
    """
    if not request.replicate_from:
        return _plan(wiring, request, base), None
    wanted = _Wanted(wiring, request)
    if wanted.begun is not None:
        found = _plan(wiring, request, base)
        record = wiring.catalog.backups.get(found.backup_id)
        return found, wanted.spec(record, found, wanted.begun.server_id, None)
    facts = wanted.look()
    if isinstance(parse_target(request.target).goal, Latest) and base is None:
        with contextlib.suppress(RefusedError):
            newest = _plan(wiring, replace(request, accept_older=True, accept_inexact=True), None)
            if newest.replay is not None:
                newest = _plan(wiring, replace(request, target=f"backup:{newest.backup_id}"), None)
            return wanted.checked(newest, facts)
    return wanted.checked(_plan(wiring, request, base), facts)


def refuse_unnamed(wiring: Wiring, actor: Actor, request: RestoreRequest) -> None:
    """Over REST a source is a server of the configuration: else whoever may restore could have the replication
    account's password sent to any address. Raises ForbiddenError, NotFoundError."""
    if not request.replicate_from:
        return
    settings, named = wiring.settings, request.replicate_from
    if settings.groups.get(named, named) not in settings.servers:
        raise ForbiddenError(
            f"{request.replicate_from[:80]!r} is not a server of the configuration",
            hint="name a configured server as the source, or use the command line on the host of the service",
        )
    see(actor, settings.groups.get(named, named), f"server {named[:80]!r}")


def _plan(wiring: Wiring, request: RestoreRequest, base: str | None) -> Plan:
    if request.datadir:
        return foresee(wiring, request, base)
    return plan(wiring, request.server, request.target, None, start=request.start, options=request.options, base=base)


class _Wanted:
    """The replica that a request asks for. ``begun``: what an earlier attempt in the same folder let loose."""

    def __init__(self, wiring: Wiring, request: RestoreRequest) -> None:
        self._wiring, self._request = wiring, request
        self._server = wiring.settings.server(request.server)
        settings = wiring.settings
        named = request.replicate_from in {*settings.servers, *settings.groups}
        self._source = settings.reached(request.replicate_from) if named else None
        self.begun = self._begun()
        self._account = self._account_at_source()

    def look(self) -> SourceFacts:
        """At the source. Raises RefusedError, ServerError."""
        facts = read_source(self._connection())
        datadir, is_here = self._request.datadir, facts.hostname == socket.gethostname()
        if datadir and is_here and os.path.realpath(facts.datadir) == os.path.realpath(datadir):
            raise RefusedError(
                f"{self._request.replicate_from} is the server that has its data in {datadir}: no server can "
                "replicate from itself",
                hint="give the replica another data directory",
            )
        return facts

    def checked(self, found: Plan, facts: SourceFacts) -> tuple[Plan, ReplicaSpec]:
        """``found`` with what the replica adds to it. Raises RefusedError."""
        request = self._request
        record = self._wiring.catalog.backups.get(found.backup_id)
        number = choose_server_id(
            request.server_id,
            self._taken(found, facts),
            os.path.realpath(request.datadir) if request.datadir else "",
            socket.gethostname(),
        )
        spec = self.spec(record, found, number, facts)
        position = found.until.position if found.until is not None else record.position
        _facts, start = spec.at(position)
        warnings = self._refuse_other_history(found, record, spec.restored, start, facts)
        seconds = max(0.0, (self._wiring.clock() - self._at(found, record)).total_seconds()) * _CATCH_UP
        step = Step(
            "replicated",
            f"replicate from {request.replicate_from} until caught up",
            0,
            seconds if request.start else 0.0,
            "assumed: ten times as fast as the source wrote it",
        )
        by, why = foreseen(facts, by_gtid=start.by_gtid, delay=spec.delay)
        shown = ReplicaPlan(
            request.replicate_from, number, start.position, start.by_gtid, start.reason, spec.delay, by, why
        )
        if why:
            warnings = (*warnings, f"the replica will not be compared with its source before it is handed over: {why}")
        steps = (*found.steps, step) if request.start else found.steps
        return replace(found, steps=steps, replica=shown, warnings=(*found.warnings, *warnings)), spec

    def _refuse_other_history(
        self, found: Plan, record: BackupRecord, restored: Restored, start: ReplicaStart, facts: SourceFacts
    ) -> tuple[str, ...]:
        """What could not be asked. Raises RefusedError where the source's history is not that of the copy, as far as
        catalog and manifest say."""
        past = history(self._wiring, self._server)
        if past is not None:
            histories = Histories(past.branches, past.runs)
            branch = histories.branch(found.until.branch) if found.until is not None else histories.branch_of(record)
            refuse_other_branch(histories, branch, restored, start, facts)
        if start.by_gtid or restored.is_own:
            return ()
        try:
            chain, _said = load_chain(found.server, found.chain, sources(self._wiring, found))
        except KeyUnusableError as error:
            return (f"{facts.address} may be another server than the backed-up one followed: {error.message}",)
        refuse_other_source(restored, start, facts, chain[-1].body.facts.server.sources)
        return ()

    def spec(self, record: BackupRecord, found: Plan, server_id: int, facts: SourceFacts | None) -> ReplicaSpec:
        """``facts``: of the source; None where the replica goes on with what it knows."""
        account, source = self._account, self._connection()
        if facts is not None and account.socket:
            account = replace(account, socket="", host=_LOOPBACK, port=facts.port)
        uuid = facts.uuid if facts is not None else ""
        is_own = uuid == record.server_uuid if uuid and record.server_uuid else self._is_same_server()
        return ReplicaSpec(
            Source(
                account.host or _LOOPBACK,
                account.port,
                account.user,
                account.password,
                account.ssl,
                encrypted=account.tls not in (None, Tls.OFF),
            ),
            source,
            account,
            Restored(
                f"backup {record.id}",
                Flavour(record.flavour),
                record.position,
                is_own,
                record.upstream if found.replay is None else None,
                record.finished_at if found.replay is None else None,
            ),
            server_id,
            self._request.delay_seconds,
        )

    def _begun(self) -> ReplicaState | None:
        if not self._request.datadir:
            return None
        marker = read_marker(Path(os.path.realpath(self._request.datadir)))
        state = state_of(marker.replica) if marker is not None else None
        return state if state is not None and state.following else None

    def _taken(self, found: Plan, facts: SourceFacts) -> frozenset[int]:
        met = {one.server_id for one in self._wiring.catalog.identities.all()}
        return frozenset({*facts.server_ids, *(found.replay.server_ids if found.replay else ()), *met} - {0})

    def _at(self, found: Plan, record: BackupRecord) -> datetime:
        return (found.until.at if found.until is not None else None) or record.finished_at

    def _is_same_server(self) -> bool:
        return self._source is not None and self._source.name == self._server.name

    def _connection(self) -> Connection:
        """How the source is looked at: as the configured account, else as that of replication."""
        return self._source.connection() if self._source is not None else self._account

    def _account_at_source(self) -> Connection:
        """Raises ConfigurationError where no account is configured."""
        whose = self._source if self._source is not None and _option_file(self._source) is not None else self._server
        file = _option_file(whose)
        if file is None:
            message = "is not set: it names the option file of the account that the replica connects with"
            problem = Problem(str(whose.file), None, f"servers.{whose.name}.replication_defaults_file", message)
            raise ConfigurationError([problem], hint="create an account with REPLICATION SLAVE at the source")
        if self._source is not None:
            return self._source.connection_as(file)
        host, port = source_address(self._request.replicate_from)
        return Connection.from_config(host=host, port=port, defaults_file=file)


def _option_file(server: ServerSettings) -> Path | None:
    return server.config.replication_defaults_file
