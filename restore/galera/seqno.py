"""How far binary logs that are replayed bring a node: the seqno of the last transaction of rows in them.

The replay ends behind it. What follows, statements that define something, has a seqno that no log shows: the cluster
sends it by IST, once; replayed as well it would be done twice, silently (an index of two names).
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from backupd.engine.binlog.scan import scan
from backupd.engine.binlog.xids import Xid, xids
from backupd.model.binlog import ReplaySpec, Transaction
from backupd.model.errors import RefusedError
from restore.replay.logs import Logs


@dataclass(frozen=True, slots=True)
class Narrowed:
    """A replay that ends at the transaction ``seqno``; ``left``: transactions behind it that are not replayed."""

    spec: ReplaySpec
    logs: Logs
    seqno: int
    left: int


def narrowed(spec: ReplaySpec, logs: Logs, base: int, domain: int | None = None) -> Narrowed | None:
    """``spec`` and its fetched ``logs`` (the last file is cut, later ones are gone), up to the last Xid. ``base``: the
    seqno of the backup; ``domain``: of the cluster's GTIDs, None with wsrep_gtid_mode=OFF. None where nothing has a
    higher one.

    Raises RefusedError for a replay across a fork, and for numbers that do not rise: transactions that were written
    with wsrep_on=OFF have numbers of their own server.
    """
    if len(spec.legs) != 1:
        raise RefusedError(
            "the binary logs go across a fork of the history, and a node cannot be brought back across one",
            hint="restore the backup alone (--to backup:ID), where a node still keeps what follows it",
        )
    leg, files = spec.legs[0], logs.legs[0]
    found: tuple[Path, Xid] | None = None
    seqno = base
    for path in files:
        for xid in xids(path, since=leg.start.pos if path.name == leg.start.file else 0):
            if xid.number <= seqno:
                raise RefusedError(
                    f"the Xid {xid.number} before byte {xid.end} of {path.name} follows {seqno}: it is no seqno",
                    detail="transactions that a session wrote with wsrep_on=OFF are in no other node's history",
                    hint="restore the backup alone (--to backup:ID), where a node still keeps what follows it",
                )
            seqno, found = xid.number, (path, xid)
    if found is None:
        return None
    path, xid = found
    kept = files[: files.index(path) + 1]
    left = _transactions_behind(files[len(kept) - 1 :], xid.end)
    last = ""

    def take(one: Transaction) -> None:
        nonlocal last
        last = one.gtid

    with path.open("rb") as stream:
        seen = scan(stream, stop=xid.end, on_transaction=take)
    if domain is not None and last.partition("-")[0] != str(domain):
        raise RefusedError(
            f"the last transaction of the binary logs, {last or 'without a GTID'}, is not the cluster's, whose domain "
            f"is {domain}: its Xid {seqno} is no seqno",
            detail="transactions that a session wrote with wsrep_on=OFF are in no other node's history",
            hint="restore the backup alone (--to backup:ID), where a node still keeps what follows it",
        )
    for gone in files[len(kept) :]:
        gone.unlink()
    os.truncate(path, xid.end)
    stop = replace(
        leg.stop, file=path.name, pos=xid.end, gtids=seen.gtids_after, at=seen.last_at, next_gtid="", next_at=None
    )
    number = int(path.name.rpartition(".")[2])
    cut = replace(
        leg,
        segments=tuple(key for key in leg.segments if key.number <= number),
        stop=stop,
        transactions=None if leg.transactions is None else leg.transactions - left,
    )
    return Narrowed(
        replace(spec, legs=(cut,), transactions=max(0, spec.transactions - left)),
        replace(logs, legs=(kept,)),
        seqno,
        left,
    )


def _transactions_behind(files: tuple[Path, ...], end: int) -> int:
    """In all of ``files``, in the first one from byte ``end`` on."""
    count = 0

    def seen(one: Transaction) -> None:
        nonlocal count
        count += one.start >= end

    for path in files:
        with path.open("rb") as stream:
            scan(stream, on_transaction=seen)
        end = 0
    return count
