"""What is looked at of a Galera cluster before a backup: settings of its nodes that spoil a recovery, or a node's way
back. Pure, but for one look at a node.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from backupd.backup.finding import Finding, fine, warning
from backupd.engine.server.probe import read_dialect
from backupd.engine.server.wsrep import probe_wsrep
from backupd.engine.sql.client import Session
from backupd.engine.sql.option_files import read_option_file
from backupd.model.server_facts import PRIMARY, WsrepState

CLUSTER = "cluster"
_VARIABLES = (
    "log_bin",
    "log_slave_updates",
    "log_replica_updates",
    "gtid_domain_id",
    "gtid_strict_mode",
    "binlog_format",
    "server_id",
)
_ARCHIVE = "sst-log-archive-dir"
_PHYSICAL_SST = ("mariabackup", "xtrabackup-v2", "clone")
"""Methods of SST that do not block the donor."""
_FEWEST_LOGGING = 2


@dataclass(frozen=True, slots=True)
class NodeLook:
    """A node and its settings. ``server``: its name in the configuration; ``archive``: the folder that its option files
    name for logs of SST, "" where none does, None where they cannot be read here. ``hooks``: does its policy take it
    out of rotation for physical backups? None: there are none."""

    server: str
    state: WsrepState
    variables: Mapping[str, str]
    archive: str | None = None
    hooks: bool | None = None

    @property
    def logs(self) -> bool:
        """Has its binary log what the whole cluster commits?"""
        updates = {self.variables.get("log_slave_updates", ""), self.variables.get("log_replica_updates", "")}
        return _is_on(self.variables.get("log_bin", "")) and any(map(_is_on, updates))


def look_at_node(session: Session, server: str, hooks: bool | None) -> NodeLook | None:
    """None of a server that is no node. Raises ServerError."""
    state = probe_wsrep(session)
    if state is None:
        return None
    rows = session.permitted(read_dialect(session).option_files) or ()
    files = [Path(str(row[0])) for row in rows if row[0]]
    return NodeLook(server, state, session.variables(*_VARIABLES), _archive(files), hooks)


def _archive(files: Sequence[Path]) -> str | None:
    """None where no file can be read here: the node may run on another host."""
    readable = [found for found in (read_option_file(path, ("sst",)) for path in files) if not found.problems]
    if not readable:
        return None
    values = [option.value or "" for found in readable for option in found.options if option.name == _ARCHIVE]
    return values[-1] if values else ""


def examine_cluster(nodes: Sequence[NodeLook]) -> Iterator[Finding]:
    """``nodes``: the configured ones of one cluster that answer."""
    first = nodes[0].state
    names = ", ".join(f"{one.server} {one.state.state}" for one in nodes)
    yield fine(CLUSTER, f"{first.name} ({first.position.uuid}) has {first.size} nodes; configured are {names}")
    yield from _membership(nodes)
    yield from _logging(nodes)
    yield from _gtids(nodes)
    yield from _sst(nodes)
    for one in nodes:
        if one.hooks is False:
            yield warning(
                CLUSTER,
                f"{one.server} is desynced while it is backed up and answers with old rows, and its policy does not "
                "take it out of rotation",
                "add hooks: {} to its policy and let the load balancer ask /healthz/servers/"
                f"{one.server}, which answers 503 until the node is Synced again",
            )


def _membership(nodes: Sequence[NodeLook]) -> Iterator[Finding]:
    apart = [one.server for one in nodes if one.state.status != PRIMARY]
    if apart:
        yield warning(
            CLUSTER,
            f"{', '.join(apart)} is not in the part of the cluster that goes on (Primary): a backup of it is old",
            "find out why: SHOW GLOBAL STATUS LIKE 'wsrep_cluster%'",
        )
    copies = [one.server for one in nodes if nodes[0].state.is_apart_from(one.state)]
    if copies:
        yield warning(
            CLUSTER,
            f"{nodes[0].server} and {', '.join(copies)} are of two clusters that have the same uuid: one was made of a "
            "copy of the other, and a backup of the one may be taken for one of the other",
            "give the copy a uuid of its own: stop all its nodes, remove grastate.dat of one and start that with "
            "--wsrep-new-cluster; then take full backups of it",
        )
    size = max(one.state.size for one in nodes)
    if len(nodes) < size:
        yield warning(
            CLUSTER,
            f"{len(nodes)} of the cluster's {size} nodes are configured and answer: which donor still holds what a "
            "restored node needs is known of these only",
            "add the others to servers: in the configuration; they need no policy with a schedule",
        )


def _logging(nodes: Sequence[NodeLook]) -> Iterator[Finding]:
    logging = [one.server for one in nodes if one.logs]
    if len(logging) < _FEWEST_LOGGING:
        which = f"only {logging[0]} writes" if logging else "no node writes"
        yield warning(
            CLUSTER,
            f"{which} a binary log of all that the cluster commits: when that node is gone, no other one goes on with "
            "it",
            "set log_bin and log_slave_updates on at least two nodes and restart them one after the other",
        )
    for form, servers in _by(nodes, "binlog_format").items():
        if form and form != "ROW":
            yield warning(
                CLUSTER,
                f"binlog_format is {form} on {', '.join(servers)}: Galera replicates rows only, and other formats make "
                "nodes abort or differ",
                "set binlog_format=ROW on every node",
            )


def _gtids(nodes: Sequence[NodeLook]) -> Iterator[Finding]:
    modes = {one.state.gtid_mode for one in nodes}
    if len(modes) > 1:
        off = [one.server for one in nodes if not one.state.gtid_mode]
        yield warning(
            CLUSTER, f"wsrep_gtid_mode is OFF on {', '.join(off)} only: GTIDs differ between nodes", "set it ON on all"
        )
    elif not modes.pop():
        yield warning(
            CLUSTER,
            "wsrep_gtid_mode is OFF: each node gives GTIDs of its own, so that earlier backups are rolled forward with "
            "the log of another node only while that has the last archived Xid",
            "set wsrep_gtid_mode=ON, and the same wsrep_gtid_domain_id, on every node",
        )
    else:
        domains = {one.state.gtid_domain for one in nodes}
        if len(domains) > 1:
            yield warning(
                CLUSTER,
                f"wsrep_gtid_domain_id differs between nodes ({', '.join(map(str, sorted(domains)))}): the same "
                "transaction has another GTID on each",
                "set the same wsrep_gtid_domain_id on every node",
            )
        numbers = _by(nodes, "server_id")
        if len(numbers) > 1:
            yield warning(
                CLUSTER,
                "server_id differs between nodes, and with wsrep_gtid_mode=ON it is part of each GTID; a node's own "
                f"position then is not in gtid_current_pos ({', '.join(sorted(numbers))})",
                "set the same server_id on every node of the cluster",
            )
    shared = [servers for servers in _by(nodes, "gtid_domain_id").values() if len(servers) > 1]
    for servers in shared:
        yield warning(
            CLUSTER,
            f"gtid_domain_id is the same on {', '.join(servers)}: what they write on their own gets the same GTIDs",
            "give each node a gtid_domain_id of its own, other than wsrep_gtid_domain_id",
        )
    strict = {value: servers for value, servers in _by(nodes, "gtid_strict_mode").items() if value}
    if len(strict) > 1:
        yield warning(
            CLUSTER,
            "gtid_strict_mode differs between nodes: " + "; ".join(f"{v} on {', '.join(s)}" for v, s in strict.items()),
            "set the same value on every node",
        )
    elif any(map(_is_on, strict)) and shared and not nodes[0].state.gtid_mode:
        yield warning(
            CLUSTER,
            "gtid_strict_mode is ON, wsrep_gtid_mode is OFF and nodes share a gtid_domain_id: transactions come out of "
            "order, and a replica of a node stops at the first one",
            "set wsrep_gtid_mode=ON, or another gtid_domain_id on each node",
        )


def _sst(nodes: Sequence[NodeLook]) -> Iterator[Finding]:
    methods = defaultdict(list)
    for one in nodes:
        methods[one.state.sst_method].append(one.server)
    for method, servers in methods.items():
        if method and method not in _PHYSICAL_SST:
            yield warning(
                CLUSTER,
                f"wsrep_sst_method is {method} on {', '.join(servers)}: a donor accepts no writes while it sends data",
                "set wsrep_sst_method=mariabackup on every node",
            )
    unset = [one.server for one in nodes if one.archive == "" and one.state.sst_method == "mariabackup"]
    if unset:
        yield warning(
            CLUSTER,
            f"{', '.join(unset)}: an SST keeps its logs in a folder under /tmp, which the next one replaces",
            f"set {_ARCHIVE} in the group [sst] of its option file",
        )


def _by(nodes: Iterable[NodeLook], variable: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for one in nodes:
        found[one.variables.get(variable, "")].append(one.server)
    return dict(found)


def _is_on(value: str) -> bool:
    return value.upper() in ("ON", "1")
