"""A Galera cluster of MariaDB servers on the loopback interface: real providers, real state transfers.

Every node has its own folder, ports and names of binary logs, and they all have one server id, as clusters do. The
nodes behind the first begin with a copy of its files and its seqno, so that they join by IST at once instead of by an
SST, which sleeps for ten seconds each.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pymysql

from tests.support.servers.datadir import Options, ServerDiedError
from tests.support.servers.mariadb import PrivateServer
from tests.support.servers.server import drop_root, free_port
from tests.support.stores.folders import give_to_database

PROVIDER = Path("/usr/lib/galera/libgalera_smm.so")
SERVER_ID = 100
"""Of every node: in a cluster that is the rule."""
DOMAIN = 10
"""wsrep_gtid_domain_id."""


class Node(PrivateServer):
    """Node ``number`` (from 1 on) of a cluster. ``cluster`` gives the addresses of all its nodes; ``settings``: what
    all nodes have; ``bootstrap``: make a new cluster at the next start."""

    def __init__(self, number: int, cluster: Callable[[], str], *, settings: Options, gcache: str) -> None:
        super().__init__(tcp=True, server_id=SERVER_ID)
        self.number = number
        self.group_port, self.ist_port, self.sst_port = free_port(), free_port(), free_port()
        self.bootstrap = False
        self.gcache = gcache
        self.sst_method = "mariabackup"
        self.provider_options = ""
        """More of them, as ``name=value;``."""
        self._cluster = cluster
        self._settings = settings
        self._extra: tuple[str, ...] = ()
        self.adopted: int | None = None
        """The process of its server where somebody else has started it."""

    @property
    def name(self) -> str:
        return f"node{self.number}"

    @property
    def address(self) -> str:
        """Where it listens for the group."""
        return f"127.0.0.1:{self.group_port}"

    def arguments(self) -> Sequence[str]:
        return (*(("--wsrep-new-cluster",) if self.bootstrap else ()), *self._extra)

    def flavour_settings(self, *, binlog: bool) -> dict[str, str | int | None]:
        logs: dict[str, str | int | None] = (
            {"log_bin": f"{self.name}-bin", "log_bin_index": f"{self.name}-bin.index", "log_slave_updates": 1}
            if binlog
            else {}
        )
        listen = f"127.0.0.1:{self.ist_port}"
        return {
            "innodb_log_file_size": "64M",
            "innodb_flush_log_at_trx_commit": 2,
            "innodb_autoinc_lock_mode": 2,
            "default_storage_engine": "InnoDB",
            "binlog_format": "ROW",
            "gtid_domain_id": 20 + self.number,
            **logs,
            "wsrep_on": "ON",
            "wsrep_provider": str(PROVIDER),
            "wsrep_cluster_name": "lab",
            "wsrep_cluster_address": f"gcomm://{self._cluster()}",
            "wsrep_node_name": self.name,
            "wsrep_node_address": self.address,
            "wsrep_provider_options": f'"base_host=127.0.0.1;base_port={self.group_port};'
            f"gmcast.listen_addr=tcp://{self.address};ist.recv_addr={listen};ist.recv_bind={listen};"
            f'gcache.size={self.gcache};gcache.page_size=16M;{self.provider_options}"',
            "wsrep_sst_method": self.sst_method,
            "wsrep_sst_receive_address": f"127.0.0.1:{self.sst_port}",
            "wsrep_sst_auth": "root:",
            "wsrep_slave_threads": 2,
            "wsrep_gtid_domain_id": DOMAIN,
            **self._settings,
        }

    def start(self, timeout: float = 300.0, *, extra: Sequence[str] = ()) -> Self:
        """Start, and wait until it is a synced member. ``extra``: words on its command line."""
        self._extra = tuple(extra)
        super().start(timeout)
        self.bootstrap = False
        self.wait(lambda: self.status("wsrep_local_state_comment") == "Synced", "it is synced", timeout)
        return self

    @property
    def running(self) -> bool:
        return super().running or (self.adopted is not None and _lives(self.adopted))

    @property
    def pid(self) -> int:
        return self.adopted if self.adopted is not None else super().pid

    def _end(self, how: signal.Signals, timeout: float) -> None:
        super()._end(how, timeout)
        adopted, self.adopted = self.adopted, None
        if adopted is None or not _lives(adopted):
            return
        os.kill(adopted, how)
        deadline = time.monotonic() + timeout
        while _lives(adopted):
            if time.monotonic() > deadline:
                os.kill(adopted, signal.SIGKILL)
            time.sleep(0.02)

    def recovered(self) -> tuple[str, str]:
        """UUID and ``SEQNO[,GTID]`` of what its stopped server's InnoDB has, as ``--wsrep-recover`` prints it."""
        self._write_options()
        argv = [*drop_root(), self.program(), f"--defaults-file={self.option_path}", "--wsrep-recover"]
        subprocess.run(argv, capture_output=True, check=True, cwd="/")
        uuid, rest = re.findall(r"WSREP: Recovered position: ([0-9a-f-]{36}):(\S+)", self.log_text())[-1]
        return uuid, rest

    def status(self, name: str) -> str:
        """A status variable; "" while the server refuses to answer."""
        try:
            found = self.query(f"SHOW GLOBAL STATUS LIKE '{name}'")
        except (pymysql.err.Error, OSError):
            self._root = None  # a joiner ends the connections that it had taken too early
            return ""
        return str(found[0][1]) if found else ""

    @property
    def last_committed(self) -> int:
        return int(self.status("wsrep_last_committed"))

    def wait(self, ready: Callable[[], bool], what: str, timeout: float = 300.0) -> None:
        deadline = time.monotonic() + timeout
        while not ready():
            if not self.running:
                raise ServerDiedError(f"{self.name} ended:\n{self.log_text()[-4000:]}")
            if time.monotonic() > deadline:
                raise AssertionError(f"{self.name}: not after {timeout} s: {what}\n{self.log_text()[-4000:]}")
            time.sleep(0.05)

    def await_seqno(self, seqno: int, timeout: float = 300.0) -> None:
        """Wait until it has applied everything up to ``seqno``."""
        self.wait(lambda: self.last_committed >= seqno, f"seqno {seqno}", timeout)

    def make_copy_of(self, other: Node) -> None:
        """Take the files of ``other``, which is stopped, with its place in the cluster's history."""
        subprocess.run(["cp", "-a", "--sparse=always", str(other.datadir), str(self.datadir)], check=True)
        caches = (self.datadir / name for name in ("galera.cache", "gvwstate.dat"))
        for path in (*self.datadir.glob(f"{other.name}-bin*"), *caches):
            path.unlink(missing_ok=True)

    def make_empty(self) -> None:
        """A data directory with nothing in it: it takes everything from a donor."""
        self.datadir.mkdir(mode=0o700)
        give_to_database(self.datadir)
        self.make_datadir()

    def _write_options(self) -> None:
        super()._write_options()
        archive = self.base / "sst"
        if not archive.is_dir():
            archive.mkdir()
            give_to_database(archive)
        with self.option_path.open("a") as file:
            file.write(f"[sst]\nsst-log-archive-dir={archive}\n")


class Cluster:
    """``size`` nodes. ``gtid_mode``: wsrep_gtid_mode. ``gcache``: how much each keeps for others. ``settings``: more
    options of every node. A context manager that starts them all, synced; none outlives it."""

    def __init__(
        self, *, size: int = 3, gtid_mode: bool = True, gcache: str = "64M", settings: Options | None = None
    ) -> None:
        every = {"wsrep_gtid_mode": "ON" if gtid_mode else "OFF", **(settings or {})}
        self.nodes: list[Node] = []
        for number in range(1, size + 1):
            self.nodes.append(Node(number, self._addresses, settings=every, gcache=gcache))

    def start(self, prepare: Callable[[Node], None] = lambda _node: None) -> Self:
        """``prepare`` is called with the first node before the others get its files."""
        first, *others = self.nodes
        first.bootstrap = True
        first.start()
        prepare(first)
        first.stop()
        for node in others:
            node.make_copy_of(first)
        first.bootstrap = True
        first.start()
        for node in others:
            node.start()
        return self

    def remove(self) -> None:
        for node in self.nodes:
            node.remove()

    def settle(self, nodes: Sequence[Node] | None = None, timeout: float = 300.0) -> int:
        """Wait until ``nodes`` (every running one) have applied what any of them has; gives the seqno."""
        wanted = [node for node in nodes or self.nodes if node.running]
        last = max(node.last_committed for node in wanted)
        for node in wanted:
            node.await_seqno(last, timeout)
        return last

    def _addresses(self) -> str:
        return ",".join(node.address for node in self.nodes)

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.remove()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def state_of(node: Node, schema: str) -> dict[str, Any]:
    """What must be equal on every node: checksums, definitions and keys of the tables of ``schema``; with
    wsrep_gtid_mode=ON the cluster's GTID, too."""
    tables = [str(row[0]) for row in node.query(f"SHOW TABLES FROM `{schema}`")]
    found: dict[str, Any] = {
        table: (
            node.query(f"CHECKSUM TABLE `{schema}`.`{table}`")[0][1],
            re.sub(r" AUTO_INCREMENT=\d+", "", str(node.query(f"SHOW CREATE TABLE `{schema}`.`{table}`")[0][1])),
        )
        for table in tables
    }
    if node.scalar("SELECT @@wsrep_gtid_mode"):
        gtids = str(node.scalar("SELECT @@gtid_binlog_state")).split(",")
        found["gtid"] = [gtid for gtid in gtids if gtid.startswith(f"{DOMAIN}-")]
    return found


def wipe(node: Node) -> None:
    """Its data directory is lost."""
    shutil.rmtree(node.datadir)
