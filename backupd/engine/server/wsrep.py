"""A node of a Galera cluster: what it says of itself and of its cluster.

Measured with MariaDB 10.11.19 and Galera 26.4.23:

* The ``Xid`` of a transaction of rows in the binary log is its seqno, the same one on every node. A DDL statement has a
  seqno, too, but no Xid event. View changes and failed certifications use up seqnos without any event.
* With wsrep_gtid_mode=ON transactions have the same GTID on every node; it does not yield the seqno. With OFF each node
  gives GTIDs of its own.
* The oldest seqno in the gcache (``wsrep_local_cached_downto``) decides whether a node comes back by IST: all that is
  behind its own seqno has to be there, so ``downto <= seqno + 1``. gcache.recover (on by default) keeps it through a
  restart and a crash.
* Between BACKUP STAGE BLOCK_DDL and END a node is desynced and its provider paused: ``wsrep_last_committed`` stands
  still.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from backupd.model.server_facts import UNKNOWN_SEQNO, ClusterPosition, WsrepState

if TYPE_CHECKING:
    from backupd.engine.sql.client import Session

_NO_PROVIDER = ("", "none")
_VARIABLES = """
wsrep_on wsrep_provider wsrep_provider_options wsrep_cluster_name wsrep_node_name wsrep_gtid_mode wsrep_gtid_domain_id
wsrep_sst_method
"""
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = re.compile(r"(\d+)([KMGT]?)", re.IGNORECASE)
_POSITION = re.compile(r"([0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}):(-?\d+)(?:\s+\d+)?\s*")
_RECOVERED = re.compile(r"Recovered WSREP position: (\S+)")
_NOBODY = "00000000-0000-0000-0000-000000000000"
_MOST_SIGNED = 2**63


def is_node(variables: Mapping[str, str]) -> bool:
    """Is a server with these global variables a node of a cluster?"""
    on = variables.get("wsrep_on", "").upper() in ("ON", "1")
    return on and variables.get("wsrep_provider", "").lower() not in _NO_PROVIDER


def probe_wsrep(session: Session) -> WsrepState | None:
    """The node as it is now; None of a server that is none. Raises ServerError."""
    variables = session.variables(*_VARIABLES.split())
    return wsrep_state(variables, wsrep_status(session)) if is_node(variables) else None


def wsrep_status(session: Session) -> dict[str, str]:
    """The status variables ``wsrep_...``, names in lower case. Raises ServerError."""
    rows = session.query("SHOW GLOBAL STATUS LIKE 'wsrep\\_%'", shown=True)
    return {str(name).lower(): str(value) for name, value in rows}


def wsrep_state(variables: Mapping[str, str], status: Mapping[str, str]) -> WsrepState:
    """What ``variables`` and ``status`` of a node say."""

    def count(name: str) -> int:
        return _number(status.get(f"wsrep_{name}", ""), 0)

    downto = _number(status.get("wsrep_local_cached_downto", ""), UNKNOWN_SEQNO)
    options = provider_options(variables.get("wsrep_provider_options", ""))
    return WsrepState(
        position=ClusterPosition(
            status.get("wsrep_cluster_state_uuid", "") or _NOBODY,
            _number(status.get("wsrep_last_committed", ""), UNKNOWN_SEQNO),
        ),
        name=variables.get("wsrep_cluster_name", ""),
        node=variables.get("wsrep_node_name", ""),
        size=count("cluster_size"),
        status=status.get("wsrep_cluster_status", ""),
        state=status.get("wsrep_local_state_comment", ""),
        cached_downto=downto if downto > 0 else None,
        gcache_bytes=size_of(options.get("gcache.size", "")),
        written_bytes=count("replicated_bytes") + count("received_bytes"),
        gtid_mode=variables.get("wsrep_gtid_mode", "").upper() in ("ON", "1"),
        gtid_domain=_number(variables.get("wsrep_gtid_domain_id", ""), 0),
        desync_count=count("desync_count"),
        recv_queue=count("local_recv_queue"),
        send_queue=count("local_send_queue"),
        flow_paused_ns=count("flow_control_paused_ns"),
        flow_sent=count("flow_control_sent"),
        provider=status.get("wsrep_provider_version", ""),
        sst_method=variables.get("wsrep_sst_method", ""),
        incoming=tuple(sorted(filter(None, map(str.strip, status.get("wsrep_incoming_addresses", "").split(","))))),
    )


def provider_options(text: str) -> dict[str, str]:
    """``wsrep_provider_options``: name to value."""
    pairs = (pair.partition("=") for pair in text.split(";"))
    return {name.strip(): value.strip() for name, equals, value in pairs if equals}


def size_of(text: str) -> int:
    """``512M`` in bytes; 0 for what is no size."""
    found = _SIZE.fullmatch(text.strip())
    return int(found[1]) * _UNITS[found[2].upper()] if found else 0


def cluster_position(text: str) -> ClusterPosition | None:
    """``UUID:seqno``, as tools and recovery write it: perhaps with a GTID domain behind it (which is often a wrong
    one), perhaps without a line end. None for anything else, and where the cluster or the seqno is not known."""
    found = _POSITION.fullmatch(text.strip().partition(",")[0])
    if found is None or found[1] == _NOBODY or int(found[2]) < 0:
        return None
    return ClusterPosition(found[1].lower(), int(found[2]))


def recovered_positions(log: str) -> tuple[ClusterPosition, ...]:
    """Every position that a prepare has found in InnoDB (``Recovered WSREP position: UUID:1192 domain_id: 0``), in
    their order."""
    return tuple(filter(None, map(cluster_position, _RECOVERED.findall(log))))


def _number(text: str, unknown: int) -> int:
    """A counter; ``unknown`` for none, and for the servers' -1 without a sign."""
    if not re.fullmatch(r"-?\d+", text):
        return unknown
    value = int(text)
    return value if -_MOST_SIGNED <= value < _MOST_SIGNED else unknown
