"""Which configured servers are the other nodes of a cluster that a node comes back to."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from backupd.app.context.settings import ServerSettings
from backupd.app.context.wiring import Wiring
from backupd.app.restores.request import RestoreRequest
from backupd.engine.server.wsrep import probe_wsrep
from backupd.engine.sql.client import Connection
from backupd.model.errors import BackupdError, RefusedError, UnknownNameError
from policies.document import suggestion
from restore.galera.rejoin import GaleraSpec

_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class _Way:
    """A configured server, or a member of a group. ``cluster``: the name of the cluster whose running node it is, ""
    for none."""

    server: ServerSettings
    cluster: str
    connection: Connection | None

    @property
    def name(self) -> str:
        return self.server.member or self.server.name


def galera_spec(wiring: Wiring, request: RestoreRequest) -> GaleraSpec:
    """What the restore of a node is given besides. The cluster is a configured group, or what its nodes call it. The
    node of a group is the member that is named, or its only one that does not run.

    Raises RefusedError where no configured server is a node of the cluster, where more than one member of a group does
    not run and none is named, and for one that runs; UnknownNameError for one that is none; ConfigurationError for the
    connection of the node itself."""
    group = wiring.settings.servers.get(request.cluster)
    groups = (request.cluster,) if group is not None and group.members else ()
    ways = [one for one in wiring.settings.ways() if not groups or one.name in (request.server, *groups)]
    with ThreadPoolExecutor(max_workers=_AT_ONCE, thread_name_prefix="members") as pool:
        asked = list(pool.map(_asked, ways))
    node = _node(wiring.settings.server(request.server), request.node, asked)
    others = [one for one in asked if one.name != (node.member or node.name) and one.connection is not None]
    found = [one for one in others if one.cluster and (one.cluster == request.cluster or one.server.name in groups)]
    if not found:
        raise _unknown(request, [one.cluster for one in others if one.cluster])
    return GaleraSpec(
        cluster=request.cluster,
        members={one.name: one.connection for one in found if one.connection is not None},
        node=node.connection(),
        option_file=node.config.server_defaults_file,
        allow_sst=request.allow_sst,
    )


def _node(server: ServerSettings, wanted: str, asked: Sequence[_Way]) -> ServerSettings:
    ways = {one.name: one for one in asked if one.server.name == server.name}
    if wanted and wanted not in (*ways, *((server.name,) if not server.is_group else ())):
        raise UnknownNameError(
            f"{wanted!r} is no member of {server.name}{suggestion(wanted, ways)}",
            hint=f"its members: {', '.join(sorted(ways))}"
            if server.is_group
            else f"{server.name} is no group of servers: leave out --node",
        )
    if not server.is_group:
        return server
    down = sorted(name for name, one in ways.items() if not one.cluster)
    if wanted and wanted not in down:
        raise RefusedError(
            f"{wanted} is a running node of {ways[wanted].cluster}",
            detail=f"members that are no running nodes: {', '.join(down) or 'none'}",
            hint="stop it first if it is to be restored",
        )
    if not wanted and len(down) != 1:
        raise RefusedError(
            f"which member of {server.name} is to come back? {len(down)} of them are no running nodes",
            detail="\n".join(down),
            hint="name it with --node MEMBER; bring them back one after the other"
            if down
            else "every member runs: there is nothing to bring back",
        )
    return ways[wanted or down[0]].server


def _unknown(request: RestoreRequest, clusters: Sequence[str]) -> RefusedError:
    known = sorted(set(clusters))
    return RefusedError(
        f"no configured server besides {request.server} is a running node of the cluster {request.cluster}"
        f"{suggestion(request.cluster, known)}",
        detail=f"clusters that were found: {', '.join(known)}" if known else "",
        hint="name a configured group, or the cluster as its nodes do (SHOW VARIABLES LIKE 'wsrep_cluster_name'), and "
        "configure at least one other node under `servers`",
    )


def _asked(server: ServerSettings) -> _Way:
    try:
        connection = server.connection()
        with connection.connect() as session:
            state = probe_wsrep(session)
    except BackupdError:
        return _Way(server, "", None)
    return _Way(server, state.name if state is not None else "", connection)
