"""The cluster that a node comes back to: its members as they are right now, and which of them can send what the node
lacks.

A member can send everything behind seqno S where ``wsrep_local_cached_downto <= S + 1``, exactly. A fresh joiner keeps
little. So each is asked, and asked again right before the node is started.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from backupd.engine.server.wsrep import probe_wsrep
from backupd.engine.sql.client import Connection
from backupd.model.errors import RefusedError, ServerError
from backupd.model.server_facts import PRIMARY, ClusterPosition, WsrepState

_DONORS = ("Synced", "Donor/Desynced")


@dataclass(frozen=True, slots=True)
class Cluster:
    """``members``: those that answered and are in the primary component, by name; ``silent``: the others, and why."""

    name: str
    members: Mapping[str, WsrepState]
    silent: Mapping[str, str]

    @property
    def uuid(self) -> str:
        """The same for all members."""
        return next(iter(self.members.values())).position.uuid

    @property
    def seqno(self) -> int:
        """The last one that a member has committed."""
        return max(state.position.seqno for state in self.members.values())

    def donors(self, seqno: int) -> tuple[str, ...]:
        """Members that can send everything behind ``seqno``."""
        return tuple(
            name
            for name, state in self.members.items()
            if state.state in _DONORS and state.cached_downto is not None and state.cached_downto <= seqno + 1
        )

    def reach(self) -> str:
        """From where on each member keeps write sets, in words."""
        return "\n".join(
            f"{name} ({state.state}) keeps write sets from {state.cached_downto} on"
            if state.cached_downto is not None
            else f"{name} ({state.state}) keeps no write sets"
            for name, state in self.members.items()
        )

    def refuse_ahead(self, position: ClusterPosition, whose: str) -> None:
        """Raises RefusedError where ``position`` is behind the cluster's end: it has what no member has."""
        if position.uuid == self.uuid and position.seqno > self.seqno:
            raise RefusedError(
                f"{whose} has {position.seqno - self.seqno} transactions that the cluster lacks: it is at "
                f"{position.seqno}, the cluster at {self.seqno}",
                hint="the cluster was started again from a node that was behind: save these transactions first "
                "(mariadb-binlog on the node's last binary logs), then decide which history goes on",
            )


def look(name: str, members: Mapping[str, Connection]) -> Cluster:
    """Ask every member of the cluster ``name``. Raises RefusedError where none takes part in it, or where they are of
    different clusters."""
    found: dict[str, WsrepState] = {}
    silent: dict[str, str] = {}
    for member, connection in members.items():
        try:
            with connection.connect() as session:
                state = probe_wsrep(session)
        except ServerError as error:
            silent[member] = error.message
            continue
        if state is None:
            silent[member] = "is no node of a cluster"
        elif state.status != PRIMARY or state.state not in (*_DONORS, "Joined"):
            silent[member] = f"is {state.status}, {state.state}"
        else:
            found[member] = state
    if not found:
        raise RefusedError(
            f"no member of the cluster {name} takes part in it",
            detail="\n".join(f"{member}: {why}" for member, why in silent.items()),
            hint="a node comes back to a cluster that works; a cluster of which no node is left is bootstrapped from "
            "one restored server",
        )
    if len({state.position.uuid for state in found.values()}) > 1:
        raise RefusedError(
            f"the members of {name} are of different clusters",
            detail="\n".join(f"{member}: {state.position}" for member, state in found.items()),
            hint="correct `members`, or the addresses of these servers",
        )
    refuse_clones(name, found)
    return Cluster(name, found, silent)


def refuse_clones(name: str, found: Mapping[str, WsrepState]) -> None:
    """Raises RefusedError for nodes of two clusters of one uuid: what one of them keeps is not what the other sends."""
    first, state = next(iter(found.items()))
    apart = [member for member, other in found.items() if state.is_apart_from(other)]
    if apart:
        raise RefusedError(
            f"the members of {name} are of two clusters that have the same uuid {state.position.uuid}: one was made of "
            "a copy of the other",
            detail="\n".join(
                f"{member}: with {', '.join(other.incoming)}, at seqno {other.position.seqno}"
                for member, other in ((first, state), *((one, found[one]) for one in apart))
            ),
            hint="give the copy another wsrep_cluster_name and a uuid of its own: stop all its nodes, remove "
            "grastate.dat of one and start that with --wsrep-new-cluster",
        )
