"""Nodes of a Galera cluster as sources of IST: each as it is now, with how much is written there, and what that means
for a node that is restored from a backup.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from backupd.app.context.wiring import Wiring
from backupd.app.restores.usable_backups import measured_rates
from backupd.engine.server.wsrep import probe_wsrep
from backupd.model.backup_record import BackupKind, BackupRecord, BackupState
from backupd.model.errors import BackupdError, RefusedError
from backupd.recovery.chains import chain_of
from backupd.recovery.ist import Donor, Forecast, NodeSample, donor_of, forecast
from restore.planning.plan import DEFAULT_RATES, Plan, bytes_of

MEASURED = timedelta(hours=1)
"""Over how long it is measured what is written."""
FRESH = timedelta(minutes=10)
"""A look that is older says nothing of now."""
_PHASES = ("fetched", "prepared", "restored", "started")
_FEW = 20
"""Up to so many servers all are asked whether they are nodes of the cluster; of more, those that were seen to be."""


@dataclass(frozen=True, slots=True)
class Looked:
    """``donors``: the nodes that were asked, by name of their server. ``troubles``: why others were not."""

    donors: tuple[Donor, ...]
    troubles: tuple[str, ...] = ()

    @property
    def uuid(self) -> str:
        """Of the cluster that the first of them is in; "" without one."""
        return self.donors[0].sample.uuid if self.donors else ""


def look(wiring: Wiring, server: str, now: datetime) -> NodeSample | None:
    """The server, or the member of a group, as a node, now; None of one that is none. Raises ServerError,
    ConfigurationError, UnknownNameError."""
    with wiring.settings.reached(server).connection().connect() as session:
        state = probe_wsrep(session)
    return NodeSample.of(server, now, state) if state is not None else None


def ways_of(wiring: Wiring, server: str) -> tuple[str, ...]:
    """The names under which a server is reached: its own, or those of its members. Raises UnknownNameError."""
    found = wiring.settings.server(server)
    return tuple(found.ways) if found.is_group else (server,)


def donors(wiring: Wiring, server: str, uuid: str = "") -> Looked:
    """The nodes of the cluster ``uuid``, asked now; by default of the one that ``server`` is of. Where it does not
    answer, that is the one that it was seen in last, or that of its newest backup. Raises NotFoundError for a server
    that is not configured."""
    now, troubles = wiring.clock(), []
    ours, known = ways_of(wiring, server), set(wiring.catalog.nodes.servers())
    names = [one.member or one.name for one in wiring.settings.ways()]
    if len(names) > _FEW:
        names = [name for name in names if name in known or name in ours]
    found: dict[str, NodeSample] = {}
    for name in names:
        try:
            sample = look(wiring, name, now)
        except BackupdError as error:
            if name in known or name in ours:
                troubles.append(f"{name} does not answer: {error.message}")
            continue
        if sample is not None:
            found[name] = sample
    uuid = uuid or next((found[name].uuid for name in ours if name in found), "") or cluster_of(wiring, server)
    return Looked(
        tuple(_measured(wiring, one) for one in _of_cluster(found.values(), uuid)),
        tuple(troubles),
    )


def seen_donors(wiring: Wiring, server: str, now: datetime) -> Looked:
    """The same as they were seen last by the service, where that is not long ago: nobody is asked. Raises
    CatalogError."""
    uuid, found = cluster_of(wiring, server), []
    for name in wiring.catalog.nodes.servers():
        samples = wiring.catalog.nodes.of(name, now - MEASURED)
        if samples and samples[-1].uuid == uuid and now - samples[-1].at <= FRESH:
            found.append(donor_of(samples))
    return Looked(tuple(found))


def cluster_of(wiring: Wiring, server: str) -> str:
    """The uuid of the cluster that a server was last seen in, or of its newest backup; "" where neither says. Raises
    CatalogError."""
    for name in ways_of(wiring, server):
        if seen := wiring.catalog.nodes.of(name, wiring.clock() - timedelta(days=2)):
            return seen[-1].uuid
    newest = newest_of(wiring.catalog.backups.list(server))
    return newest.node.uuid if newest is not None and newest.node is not None else ""


def newest_of(records: Iterable[BackupRecord]) -> BackupRecord | None:
    """Of the usable physical backups that know their position in their cluster the one that is furthest."""
    usable = [
        one
        for one in records
        if one.kind is not BackupKind.LOGICAL
        and one.state is BackupState.COMPLETE
        and not one.apart
        and not one.foreign
        and one.node is not None
        and one.node.position is not None
    ]
    return max(usable, key=lambda one: (one.finished_at, one.id), default=None)


def predicted(wiring: Wiring, record: BackupRecord, listed: Iterable[BackupRecord]) -> timedelta | None:
    """How long a restore of this backup takes, by measured and assumed rates; None where its chain is not whole.
    ``listed``: the backups of its server. Raises CatalogError."""
    try:
        sizes = [one.stats.bytes_source for one in chain_of(record.id, listed)]
    except (BackupdError, KeyError):
        return None
    rates = {**DEFAULT_RATES, **measured_rates(wiring, record.server)}
    return timedelta(seconds=sum(rates[name].estimate(bytes_of(name, sizes)) for name in _PHASES))


def forecast_of(
    wiring: Wiring, record: BackupRecord, listed: Iterable[BackupRecord], donors: Iterable[Donor], now: datetime
) -> Forecast:
    """How a node comes back that is restored from this backup, beginning ``now``. Raises CatalogError."""
    position = record.node.position if record.node is not None else None
    return forecast(position, donors, now=now, predicted=predicted(wiring, record, listed))


def with_forecast(wiring: Wiring, server: str, found: Plan) -> Plan:
    """The plan of a restore of a node, with what becomes of it. Where binary logs are replayed the seqno is only known
    when they are read. Raises CatalogError."""
    record = wiring.catalog.backups.get(found.backup_id)
    if found.replay is not None or record.node is None:
        return found
    verdict = foretold(wiring, server, record, timedelta(seconds=found.seconds))
    if verdict.is_ist:
        return replace(found, reason=f"{found.reason}; {verdict.words}")
    return replace(found, warnings=(*found.warnings, verdict.words))


def foretold(wiring: Wiring, server: str, record: BackupRecord, takes: timedelta) -> Forecast:
    """How the node comes back that is restored from this backup now, which ``takes`` so long. Raises CatalogError."""
    node = record.node
    looked = donors(wiring, server, node.uuid if node is not None else "")
    others = besides(server, looked.donors)
    return forecast(node.position if node is not None else None, others, now=wiring.clock(), predicted=takes)


def besides(server: str, found: Iterable[Donor]) -> tuple[Donor, ...]:
    """Without the node itself, whose cache is lost with it. Where no other is configured nothing better is known."""
    everyone = tuple(found)
    return tuple(one for one in everyone if one.sample.server != server) or everyone


def _measured(wiring: Wiring, sample: NodeSample) -> Donor:
    return donor_of((*wiring.catalog.nodes.of(sample.server, sample.at - MEASURED), sample))


def _of_cluster(samples: Iterable[NodeSample], uuid: str) -> list[NodeSample]:
    """Those of the cluster ``uuid``; of one that nobody knows all."""
    return sorted((one for one in samples if not uuid or one.uuid == uuid), key=lambda one: one.server)


def refuse_no_node(looked: Looked, server: str) -> None:
    """Raises RefusedError where nothing of a cluster was found."""
    if not looked.donors:
        raise RefusedError(
            f"{server} is no node of a Galera cluster that answers",
            detail="\n".join(looked.troubles),
            hint=f"to see what it is: backupd check {server}",
        )
