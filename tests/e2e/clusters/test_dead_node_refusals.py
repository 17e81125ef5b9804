"""A dead node whose backups are damaged, not whole, or of another cluster, or whose cluster keeps too little: that is
told before anything is touched. And a join that hangs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.clusters.test_dead_node_trouble import assert_true_to_its_file, own_servers
from tests.support.dice import SOAK
from tests.support.e2e.archived import Archive, flip
from tests.support.e2e.house import SERVER
from tests.support.e2e.lab import Lab, burst, die, forget_cache, laboratory, writing
from tests.support.e2e.service import ONCE_A_YEAR, serving
from tests.support.keys import Keys
from tests.support.servers.galera import Node, state_of
from tests.support.service.mail_server import MailBox, mail_server
from tests.support.service.serving import held_port

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a restored copy is given to the server's user")


def command(lab: Lab, to: str) -> tuple[str, ...]:
    datadir = str(lab.node.datadir)
    return ("restore", SERVER, "--to", to, "--datadir", datadir, "--mode", "galera", "--cluster", "lab", "--start")


def files_of(node: Node) -> dict[str, tuple[int, int]]:
    """Size and time of everything in its data directory."""
    return {
        str(path.relative_to(node.datadir)): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in node.datadir.rglob("*")
    }


@contextmanager
def untouched(lab: Lab) -> Iterator[None]:
    """The dead node's old data directory and its cluster are the same afterwards."""
    node, second, _third = lab.cluster.nodes
    before, view = files_of(node), second.status("wsrep_cluster_conf_id")
    yield
    assert files_of(node) == before
    assert not list(node.datadir.parent.glob(f"{node.datadir.name}.old-*"))
    assert second.status("wsrep_cluster_conf_id") == view, "no node came or went"
    assert second.status("wsrep_local_state_comment") == "Synced"


@contextmanager
def moved_away(path: Path) -> Iterator[None]:
    aside = path.with_name(f"{path.name}.aside")
    path.rename(aside)
    try:
        yield
    finally:
        aside.rename(path)


@contextmanager
def flipped(path: Path) -> Iterator[None]:
    content = path.read_bytes()
    flip(path)
    try:
        yield
    finally:
        path.write_bytes(content)


@SOAK
def test_what_is_missing_or_damaged_is_refused_with_seqnos_and_nothing_is_touched(keys: Keys) -> None:
    with laboratory(keys, gtid_mode=True) as lab:
        node, second, third = lab.cluster.nodes
        with writing(second, third):
            chain = [lab.backup()]
            chain += [lab.ok("backup", SERVER, "--kind", "incremental") for _number in range(2)]
        burst(node, 300)
        archive = Archive(lab, node)
        archive.take()
        for other in (second, third):
            forget_cache(other)
        node.stop()
        seqnos = [record["galera"]["seqno"] for record in chain]
        ids = [record["id"] for record in chain]

        def refused(to: str) -> str:
            with untouched(lab):
                said = lab.fails(*command(lab, to)).all
            staging = node.datadir.with_name(f"{node.datadir.name}.restoring")
            if staging.exists():
                lab.remove_datadir(staging)
            return said

        with moved_away(lab.manifest(ids[1]).parent):
            said = refused(f"backup:{ids[2]}")
            assert ids[1] in said
            assert all(f"at {seqno}" in said for seqno in seqnos), said
        assert f"the cluster at {second.last_committed}" in said

        largest = max(lab.tree(ids[2]), key=lambda path: path.stat().st_size)
        with flipped(largest):
            said = refused(f"backup:{ids[2]}")
            assert "damaged" in said, said
            assert all(f"at {seqno}" in said for seqno in seqnos), said

        part = max((lab.repository / "binlogs").rglob("part-*"), key=lambda path: path.stat().st_size)
        for away in (flipped, moved_away):
            with away(part):
                said = refused("latest")
                assert any(f"at {seqno}, the cluster at " in said for seqno in seqnos), said

        outcome = lab.rejoin("--to", "latest")
        assert outcome["join"]["outcome"] == "ist", outcome
        lab.cluster.settle()
        assert state_of(node, "shop") == state_of(second, "shop")


@SOAK
def test_an_increment_of_another_cluster_is_refused_with_both_positions(keys: Keys) -> None:
    with laboratory(keys, gtid_mode=True) as lab:
        node, second, third = lab.cluster.nodes
        full = lab.backup()
        for one in lab.cluster.nodes:
            one.stop()
        (node.datadir / "grastate.dat").unlink()  # a bootstrap without it makes a cluster with a uuid of its own
        node.bootstrap = True
        node.start()
        node.stop()
        for other in (second, third):
            lab.remove_datadir(other.datadir)
            other.make_copy_of(node)
        node.bootstrap = True
        node.start()
        second.start()
        third.start()
        burst(node, 20)
        other_uuid = second.status("wsrep_cluster_state_uuid")
        assert other_uuid != full["galera"]["uuid"]
        increment = lab.ok("backup", SERVER, "--kind", "incremental")
        node.stop()
        with untouched(lab):
            said = lab.fails(*command(lab, f"backup:{full['id']}")).all
        assert f"{full['galera']['uuid']}:{full['galera']['seqno']}" in said, said
        assert other_uuid in said
        lab.remove_datadir(node.datadir.with_name(f"{node.datadir.name}.restoring"))
        if increment["kind"] != "physical-full":
            with untouched(lab):
                said = lab.fails(*command(lab, f"backup:{increment['id']}")).all
            assert "do not follow each other" in said, said
            assert f"{full['galera']['uuid']}:{full['galera']['seqno']}" in said
            assert f"{other_uuid}:{increment['galera']['seqno']}" in said


HASTY = """
import functools, sys
from restore.galera import rejoin
rejoin.watch = functools.partial(rejoin.watch, still=10.0)
from backupd.cli.main import main
sys.exit(main())
"""
"""The command line, which takes a join for one that hangs after ten seconds instead of minutes."""


@SOAK
def test_a_join_that_hangs_is_ended_by_its_process_and_can_be_tried_again(keys: Keys) -> None:
    with laboratory(keys, gtid_mode=True) as lab:
        node, second, _third = lab.cluster.nodes
        full = lab.backup()["id"]
        burst(node, 400)
        die(node)
        node.sst_method = "skip"  # with it a joiner waits for its state without end
        node._write_options()
        done = subprocess.run(
            [sys.executable, "-c", HASTY, *command(lab, f"backup:{full}"), "--json"],
            env=lab.environment(),
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 1, done.stdout + done.stderr
        joined = json.loads(done.stdout)["join"]
        assert joined["outcome"] == "hung", joined
        assert "nothing has happened for 10 s" in joined["reason"]
        assert joined["pid"] == 0
        assert not own_servers(lab)
        assert_true_to_its_file(lab)
        node.sst_method = "mariabackup"
        node._write_options()
        outcome = lab.rejoin("--to", f"backup:{full}")
        assert outcome["join"]["outcome"] == "ist", outcome
        lab.cluster.settle()
        assert state_of(node, "shop") == state_of(second, "shop")


def forecasts(lab: Lab, full: str) -> tuple[str, str]:
    """What `cluster` and `plan` say of a node that is restored from this backup."""
    seen = {one["backup"]: one["forecast"]["outcome"] for one in lab.ok("cluster", SERVER)["backups"]}
    planned = lab.ok("plan", SERVER, "--to", f"backup:{full}", "--mode", "galera", "--cluster", "lab")
    return seen[full], "; ".join(planned["warnings"])


@SOAK
def test_what_the_donors_do_not_keep_is_told_before_and_a_full_copy_is_mailed(keys: Keys) -> None:
    with laboratory(keys, gtid_mode=False) as lab, held_port() as port:
        box = MailBox(port=port)
        lab.config_extra = (
            "api: {enabled: false}\nalerts:\n"
            f"  email: {{smtp: {box.url}, from: backupd@example.com, to: [dba@example.com]}}\n"
        )
        lab.policy_extra = ""
        lab.write()
        (lab.base / "policies" / "gold.yaml").write_text(ONCE_A_YEAR)
        node, second, third = lab.cluster.nodes
        full = lab.backup()["id"]
        die(node)
        burst(second, 800)  # a node that comes back gets some hundred that are older than its own seqno
        assert forecasts(lab, full)[0] == "ist"

        # One donor forgets its cache at each start, the other one has lost it.
        second.provider_options = "gcache.recover=no;"
        second.stop()
        second.start()
        assert forecasts(lab, full)[0] == "ist", "the third still has it"
        forget_cache(third)
        outcome, warning = forecasts(lab, full)
        assert outcome == "sst"
        assert re.search(r"SST: seqno \d+ is in no gcache", warning), warning
        said = lab.fails(*command(lab, f"backup:{full}")).all
        assert "can send what the node lacks by IST" in said
        assert not own_servers(lab)
        with mail_server(box, port=port), serving(lab):
            joined = lab.rejoin("--to", f"backup:{full}", "--allow-sst", code=1)
            assert joined["join"]["outcome"] == "sst", joined
            box.wait(lambda: any("restore is incomplete" in one for one in box.subjects()))
        lab.cluster.settle()
        assert state_of(node, "shop") == state_of(second, "shop") == state_of(third, "shop")

        # A cache that is too small for what is written between backup and restore.
        for other in (second, third):
            other.gcache, other.provider_options = "1M", "gcache.page_size=1M;"
            forget_cache(other)  # a larger file is taken up as it is
        full = lab.backup()["id"]
        die(node)
        assert forecasts(lab, full)[0] == "ist"
        with second.connect() as connection, connection.cursor() as cursor:
            for _number in range(1500):  # what a node has not reported as applied is kept beyond the size
                cursor.execute(
                    "INSERT INTO shop.orders (client, note) SELECT 7, REPEAT('x', 50) FROM shop.seq_1_to_100"
                )
        lab.cluster.settle()
        outcome, warning = forecasts(lab, full)
        assert outcome == "sst"
        assert "is in no gcache" in warning
