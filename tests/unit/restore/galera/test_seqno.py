"""Where a replay onto a node ends. The oracle is a history: what happened at each seqno of the cluster."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backupd.engine.binlog.scan import scan
from backupd.model.binlog import ReplayLeg, ReplayMethod, ReplaySpec, Stop
from backupd.model.errors import RefusedError
from backupd.model.server_facts import Position
from restore.galera.seqno import Narrowed, narrowed
from restore.replay.logs import Logs
from tests.support.logs.node_logs import DOMAIN, SERVER_ID, Happened, write

BASE = 100
ROWS, DDL, NOTHING = Happened.ROWS, Happened.DDL, Happened.NOTHING


def cut(
    folder: Path, *files: list[Happened], first: int = BASE + 1, domain: int | None = None
) -> tuple[Narrowed | None, dict[int, tuple[str, int]]]:
    """The replay of ``files``, and where each seqno that has events ends."""
    ends: dict[int, tuple[str, int]] = {}
    paths, seqno, gtid = [], first, 1
    for number, history in enumerate(files, start=1):
        written = write(history, first=seqno, gtid=gtid)
        path = folder / f"node1-bin.{number:06}"
        path.write_bytes(written.data)
        paths.append(path)
        ends |= {one: (path.name, end) for one, end in written.ends.items()}
        seqno, gtid = seqno + len(history), gtid + len(written.ends)
    stop = Stop("b", paths[-1].name, paths[-1].stat().st_size, f"{DOMAIN}-{SERVER_ID}-{gtid - 1}")
    leg = ReplayLeg((), Position(paths[0].name, 4, ""), stop, transactions=len(ends))
    spec = ReplaySpec((leg,), ReplayMethod.APPLIER, "", 0, len(ends), (SERVER_ID,))
    return narrowed(spec, Logs((tuple(paths),), ()), BASE, domain), ends


HISTORIES = st.lists(st.lists(st.sampled_from(list(Happened)), max_size=8), min_size=1, max_size=3)


@given(files=HISTORIES)
def test_the_seqno_is_the_data_and_no_statement_is_sent_twice(
    files: list[list[Happened]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    found, ends = cut(tmp_path_factory.mktemp("logs"), *files)
    happened = [one for history in files for one in history]
    rows = [seqno for seqno, one in enumerate(happened, start=BASE + 1) if one is ROWS]
    if not rows:
        assert found is None
        return
    assert found is not None
    assert found.seqno == rows[-1]
    leg = found.spec.legs[0]
    assert (leg.stop.file, leg.stop.pos) == ends[found.seqno]
    replayed = []
    for path in found.logs.legs[0]:
        with path.open("rb") as stream:
            scan(stream, on_transaction=lambda one: replayed.append(one.gtid))
    # All that happened up to that seqno is replayed, and nothing that the cluster will send.
    assert len(replayed) == sum(seqno <= found.seqno for seqno in ends) == leg.transactions
    assert found.left == sum(seqno > found.seqno for seqno in ends)
    assert leg.stop.gtids == f"{DOMAIN}-{SERVER_ID}-{len(replayed)}"
    assert found.logs.legs[0][-1].stat().st_size == leg.stop.pos


def test_trailing_definitions_are_left_to_the_cluster(tmp_path: Path) -> None:
    found, _ends = cut(tmp_path, [ROWS, DDL, ROWS, DDL, DDL], [DDL, NOTHING])
    assert found is not None
    assert (found.seqno, found.left) == (BASE + 3, 3)
    assert not (tmp_path / "node1-bin.000002").exists()


def test_numbers_that_do_not_rise_are_no_seqnos(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="it is no seqno"):
        cut(tmp_path, [ROWS, ROWS], first=BASE - 1)


def test_the_last_transaction_has_to_be_the_clusters(tmp_path: Path) -> None:
    """One that a session wrote with wsrep_on=OFF has the node's own domain, and an Xid that may look like a seqno."""
    found, _ends = cut(tmp_path, [ROWS, ROWS], domain=DOMAIN)
    assert found is not None
    with pytest.raises(RefusedError, match=f"10-100-2, is not the cluster's.*Xid {BASE + 2} is no seqno"):
        cut(tmp_path, [ROWS, ROWS], domain=DOMAIN + 1)


def test_a_replay_across_a_fork_is_refused(tmp_path: Path) -> None:
    found, _ends = cut(tmp_path, [ROWS])
    assert found is not None
    twice = replace(found.spec, legs=found.spec.legs * 2)
    with pytest.raises(RefusedError, match="across a fork"):
        narrowed(twice, found.logs, BASE)


def test_the_moment_of_the_end_is_that_of_its_transaction(tmp_path: Path) -> None:
    found, _ends = cut(tmp_path, [ROWS, DDL])
    assert found is not None
    at = found.spec.stop.at
    assert at is not None
    assert at < datetime(2030, 1, 1, tzinfo=UTC)
