"""What of a new replica is compared with its source before it is handed over.

With GTIDs: whether it has executed anything that its source has not. MariaDB's copy writes no binary log, so what it
received is compared; an event with its own server id would not be applied by it, so its source may have none. Without
GTIDs a place in the source's log shows nothing of the rows: the checksums of its tables are compared with those of the
source at one place, smallest first, for as long as that may take. Where that is impossible, too, nothing is compared,
and the outcome says so.
"""

from __future__ import annotations

from dataclasses import dataclass

from backupd.engine.consistency import Compared, at_one_position, sees_all
from backupd.engine.server.accounts import read_grants
from backupd.engine.server.errant import advice, as_received, errant, incomparable, own_numbers, read_gtids
from backupd.engine.sql.client import Connection, Session
from backupd.model.errors import RefusedError, ServerError, ToolError
from backupd.model.proof import Check
from backupd.model.text import few
from backupd.process.run_context import RunContext
from restore.datadir.checks import PASSED, SKIPPED
from restore.planning.plan import ComparedBy
from restore.replica.source import SourceFacts

COMPARED = "compared with its source before it was handed over"
CHECKSUM_SECONDS = 120.0
"""The longest that checksums are compared."""
LATE = "there are no GTIDs, and the rows of a delayed replica are older than its source's"
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class HandOver:
    """``by``: what was compared. ``why``: why not all of it was, or nothing. ``detail``: what was found equal."""

    by: ComparedBy
    why: str = ""
    detail: str = ""

    @property
    def check(self) -> Check:
        """For the outcome: it passed only where all that there is was compared."""
        parts = (self.detail, f"not compared: {self.why}" if self.why else "")
        return Check(COMPARED, SKIPPED if self.why else PASSED, "; ".join(filter(None, parts)))


def foreseen(source: SourceFacts, *, by_gtid: bool, delay: int) -> tuple[ComparedBy, str]:
    """What will be compared, and why nothing. Pure."""
    if by_gtid:
        return (ComparedBy.RECEIVED if source.is_mariadb else ComparedBy.GTIDS), ""
    if delay:
        return ComparedBy.NOTHING, LATE
    if not source.is_readable:
        return ComparedBy.NOTHING, (
            f"there are no GTIDs, and the account that asks {source.address} may not read every table (SELECT ON *.*)"
        )
    return ComparedBy.CHECKSUMS, ""


def compare_gtids(session: Session, source: Connection) -> HandOver:
    """The replica is read first. Raises RefusedError where it has executed what its source has not; ServerError."""
    here = as_received(read_gtids(session))
    with source.connect() as other:
        there = [read_gtids(other)]
    if why := incomparable(here, there):
        return HandOver(ComparedBy.NOTHING, why)
    if found := errant(here, there):
        raise RefusedError(
            "the replica has executed transactions that its source has not: it is not handed over",
            detail="\n".join(map(str, found)),
            hint=advice(found, mariadb=here.mariadb),
        )
    if clash := own_numbers(here, there):
        raise RefusedError(
            f"the source's history has transactions with the replica's own server_id {here.server_id}: a replica does "
            "not apply these",
            detail=", ".join(clash),
            hint="remove this copy, and restore with another --server-id",
        )
    by = ComparedBy.RECEIVED if here.mariadb else ComparedBy.GTIDS
    return HandOver(by, detail=f"{by.words}: its source has all of them")


def compare_checksums(source: Connection, replica: Connection, context: RunContext) -> HandOver:
    """Raises RefusedError where a table is not as at the source; ServerError where one of the two is gone."""
    with source.connect() as session:
        if not sees_all(read_grants(session)):
            why = f"the account that asks {source.address} may not read every table (SELECT ON *.*)"
            return HandOver(ComparedBy.NOTHING, f"there are no GTIDs, and {why}")
    try:
        found = at_one_position(source, replica, context, seconds=CHECKSUM_SECONDS)
    except (RefusedError, ServerError, ToolError) as error:
        return HandOver(ComparedBy.NOTHING, f"there are no GTIDs, and checksums failed: {error.line}")
    return judged(found)


def judged(found: Compared) -> HandOver:
    """Pure. Raises RefusedError where a table differs."""
    if found.different:
        raise RefusedError(
            f"{len(found.different)} tables of the replica are not as at its source: it is not handed over",
            detail="\n".join(f"{name} {how}" for name, how in found.different.items()),
            hint="restore from another backup, and have that one proved",
        )
    unread = [f"{name} ({why})" if why else name for name, why in found.unchecked.items()]
    return HandOver(
        ComparedBy.CHECKSUMS if found.equal or not unread else ComparedBy.NOTHING,
        f"{len(unread)} tables: {few(unread, _SHOWN)}" if unread else "",
        f"{len(found.equal)} tables have the source's checksums at one position",
    )
