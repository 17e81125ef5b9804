"""Increment or full? Decided before each incremental backup, and where a full one is taken instead, why.

A full backup is never wrong, an increment on a parent that is gone, damaged or of another history is worthless: so
everything that cannot be shown to be good speaks for a full one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from backupd.app.context.settings import ServerSettings
from backupd.app.context.wiring import Wiring
from backupd.app.restores.usable_backups import measured_rates
from backupd.engine.physical.capture import PhysicalTool
from backupd.engine.physical.imported_tables import imported_tables, newest_table
from backupd.engine.server.binary_logs import contradiction, current_lsn, last_checkpoint, layout_of, missing_evidence
from backupd.engine.sql.client import Session
from backupd.model.backup_record import BackupKind, BackupRecord, BackupState
from backupd.model.errors import DamagedError, NotFoundError
from backupd.model.manifest import Header, Landmarks
from backupd.model.proof import FAILED, UNDECIDED, Proof
from backupd.model.server_facts import ServerInfo, Version
from backupd.model.text import few, format_duration, format_size, format_time
from backupd.recovery.chains import chain_of
from backupd.transfer.deletion import is_whole, marks
from backupd.transfer.records.manifests import read
from policies.policy import Physical
from restore.datadir.staging import MARKER, UNKNOWN, restored_by
from restore.planning.plan import DEFAULT_RATES, bytes_of
from storage.destination import Destination

_PHASES = ("fetched", "prepared", "restored", "started")
_WORTH_IT = 32 * 1024 * 1024
"""Bytes. Below this a full backup instead of increments saves nobody anything: of a small server, each increment is
mostly redo log that the server has not written to its tables yet."""
_MAX_CHAIN: int = Physical.model_fields["max_chain"].default


@dataclass(frozen=True, slots=True)
class Decision:
    """``chain``: what an increment builds on, the full backup first; empty for a full one. ``reason``: why a full one
    is taken when an increment was due."""

    kind: BackupKind
    chain: tuple[BackupRecord, ...] = ()
    reason: str = ""

    @property
    def parent(self) -> BackupRecord | None:
        """The backup that an increment builds on; None for a full one."""
        return self.chain[-1] if self.chain else None


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What is there when an increment is due. ``info``, ``session``: of the server as it is; ``destinations``: where
    the backup must go; ``recipients``: fingerprints of the keys that it will be sealed for."""

    wiring: Wiring
    server: ServerSettings
    info: ServerInfo
    tool: PhysicalTool
    session: Session
    destinations: Sequence[Destination]
    recipients: Collection[str]

    def decide(self, kind: BackupKind) -> Decision:
        """What to take now. Reads the catalog, the destinations and the server; changes nothing. Raises ServerError,
        DestinationError."""
        if kind is not BackupKind.PHYSICAL_INCREMENTAL:
            return Decision(kind)
        try:
            records = self.wiring.catalog.backups.list(self.server.name)
            # What was taken of a stranger under this name is no reason to begin anew with the right server.
            chain = _newest_chain([b for b in records if not b.apart or b.server_uuid == self.info.server_uuid])
        except (NotFoundError, DamagedError) as error:
            return Decision(BackupKind.PHYSICAL_FULL, reason=error.line)
        reason = next(self._objections(chain), "")
        if reason:
            return Decision(BackupKind.PHYSICAL_FULL, reason=reason)
        return Decision(kind, chain)

    def _objections(self, chain: tuple[BackupRecord, ...]) -> Iterator[str]:
        """Everything that speaks against an increment on ``chain``, cheap questions first; a caller may stop at one."""
        if not self.tool.takes_increments:
            yield f"{self.tool.tool.name} takes no increments"
        if not chain:
            yield "there is no full backup yet"
            return
        yield from _of_length(self.server, chain)
        yield from _of_origin(self.info, chain[-1], self.tool)
        yield from _of_time(self.wiring, self.server, chain)
        for destination in self.destinations:
            yield from _of_copies(destination, chain, self.tool, self.recipients)
        yield from _of_proofs(self.wiring, chain)
        last = chain[-1]
        against = contradiction(self.session, self.info, last.position, last.to_lsn)
        if against:
            yield f"{against} (compared with backup {last.id})"
        landmarks = next(
            (
                found.header.landmarks
                for destination in self.destinations
                for found in [read(destination, last.server, last.id)]
                if found is not None and isinstance(found.header, Header)
            ),
            None,
        )
        if landmarks is None:
            yield (
                f"{last.id} does not record how to verify that the server continues from it: an earlier version took it"
            )
            return
        yield from _of_history(self.session, self.info, last, landmarks, self.wiring.identity_key())
        yield from _of_tables(self.session, last, landmarks)


def _newest_chain(backups: Sequence[BackupRecord]) -> tuple[BackupRecord, ...]:
    """The line of the newest physical backup, whatever its state is: an older one must not be taken up again."""
    physical = [b for b in backups if b.kind is not BackupKind.LOGICAL]
    if not physical:
        return ()
    return chain_of(max(physical, key=lambda b: (b.finished_at, b.id)).id, physical)


def _of_length(server: ServerSettings, chain: tuple[BackupRecord, ...]) -> Iterator[str]:
    most = server.policy.physical.max_chain if server.policy.physical else _MAX_CHAIN
    increments = chain[1:]
    if len(increments) >= most:
        yield f"{len(increments)} increments build on {chain[0].id}, the policy's max_chain is {most}"
    grown, full = sum(b.stats.bytes_new for b in increments), chain[0].stats.bytes_stored
    if grown >= max(full, _WORTH_IT):
        yield (
            f"the {len(increments)} increments on {chain[0].id} have grown to {format_size(grown)}, "
            f"as large as the full backup ({format_size(full)})"
        )


def _of_origin(info: ServerInfo, last: BackupRecord, tool: PhysicalTool) -> Iterator[str]:
    """Is it the same server, of the same series, with numbers to go on from?"""
    if last.server_uuid and info.server_uuid and last.server_uuid != info.server_uuid:
        yield f"this is another server: {last.id} was taken from {last.server_uuid}, this one is {info.server_uuid}"
    if not last.flavour or not last.server_version:
        yield f"the catalog does not record which server series {last.id} was taken from"
        return
    before = f"{last.flavour} {Version.parse(last.server_version).series}"
    now = f"{info.flavour} {info.version.series}"
    if before != now:
        yield f"the server is {now}, {last.id} was taken from {before}"
    tools = Version.parse(last.tool_version).series if last.tool_version else "an unknown series"
    if tools != tool.tool.version.series:
        yield f"{tool.tool.name} is of series {tool.tool.version.series}, {last.id} was taken with {tools}"
    if last.to_lsn <= 0:
        yield f"{last.id} was taken by a tool that does not support increments"


def _of_time(wiring: Wiring, server: ServerSettings, chain: tuple[BackupRecord, ...]) -> Iterator[str]:
    """Would a restore of the chain with one increment more, as large as the last one, take too long?"""
    allowed = server.policy.objectives.rto
    if allowed is None:
        return
    rates = {**DEFAULT_RATES, **measured_rates(wiring, server.name)}
    increments = chain[1:]
    sizes = [b.stats.bytes_source for b in (*chain, *increments[-1:])]
    needed, of_full = (
        sum(rates[name].estimate(bytes_of(name, some)) for name in _PHASES) for some in (sizes, sizes[:1])
    )
    # Where the full backup alone takes too long, taking more of them would not help.
    if needed > allowed.total_seconds() >= of_full:
        yield (
            f"a restore of {chain[0].id} with {len(increments) + 1} increments is predicted to take "
            f"{format_duration(needed)}, the objective (rto) is {format_duration(allowed.total_seconds())}"
        )


def _of_copies(
    destination: Destination, chain: tuple[BackupRecord, ...], tool: PhysicalTool, recipients: Collection[str]
) -> Iterator[str]:
    """The destinations are asked, not only the catalog."""
    marked = marks(destination)
    for record in chain:
        where = f"{record.id} at destination {destination.name}"
        if record.state is BackupState.DELETED or (record.server, record.id) in marked:
            yield f"{where} is marked as deleted"
        copies = [copy.state for copy in record.copies if copy.destination == destination.name]
        if record.doubtful or record.missing:
            yield f"{record.id} " + (record.doubtful or f"lacks {len(record.missing or ())} tables that the server had")
        if record.state is BackupState.DAMAGED or "damaged" in copies:
            yield f"{where} is known to be damaged"
        found = read(destination, record.server, record.id)
        if found is None:
            yield f"{where} is missing: there is no manifest"
        elif not isinstance(found.header, Header):
            yield f"{where} is damaged: its manifest cannot be read"
        elif (found.header.kind, found.header.parent, found.header.to_lsn) != (
            str(record.kind),
            record.parent,
            record.to_lsn,
        ):
            yield f"the manifest of {where} differs from the catalog"
        elif found.header.tool != tool.tool.name:
            yield f"{record.id} was taken with {found.header.tool or 'an unknown tool'}, now it is {tool.tool.name}"
        elif set(found.header.recipients) != set(recipients):
            yield f"{record.id} is sealed for other keys than the configuration names now"
        elif not is_whole(destination, record.server, record.id):
            yield f"{where} is damaged: objects of it are missing or have another size"


def _of_history(
    session: Session, info: ServerInfo, last: BackupRecord, landmarks: Landmarks, key: bytes
) -> Iterator[str]:
    """Is the server of the same life as it was, and are its files laid out as they were?"""
    restored = restored_by(Path(info.datadir))
    if restored == UNKNOWN:
        yield f"cannot determine whether the server was restored after backup {last.id}: {MARKER} cannot be read"
    elif restored != landmarks.restore:
        yield (
            f"the server was restored after backup {last.id} (restore {restored})"
            if restored
            else f"this is not the data directory that backup {last.id} was taken from"
        )
    missing = missing_evidence(info, last.position, landmarks.log, key)
    if missing:
        yield f"{missing} (compared with backup {last.id})"
    for name, reached, before in (
        ("log sequence number", current_lsn(session), landmarks.last_lsn),
        ("checkpoint", last_checkpoint(session), last.to_lsn),
    ):
        if reached is not None and reached < before:
            yield (
                f"the server's {name} is {reached}, backup {last.id} goes to {before}: it was rolled back or recreated"
            )
    now = layout_of(info)
    changed = sorted(name for name in {*now, *landmarks.layout} if now.get(name) != landmarks.layout.get(name))
    if changed:
        yield f"{', '.join(changed)} changed since {last.id}"


def _of_tables(session: Session, last: BackupRecord, landmarks: Landmarks) -> Iterator[str]:
    """Does a table hold pages that no increment would contain?"""
    if landmarks.table is None or newest_table(session) is None:
        yield (
            f"cannot determine which tables were created or imported since {last.id}: a table is or was without its"
            " tablespace (DISCARD TABLESPACE), or the account lacks PROCESS"
        )
        return
    try:
        imported = imported_tables(session, newer_than=landmarks.table, lsn=last.to_lsn)
    except OSError as error:
        yield f"a table that was created since {last.id} cannot be read: {error.strerror} ({error.filename})"
        return
    if imported:
        yield f"pages of a tablespace that was imported since {last.id} are in no increment: {few(imported, 5)}"


def _of_proofs(wiring: Wiring, chain: tuple[BackupRecord, ...]) -> Iterator[str]:
    """Did a test restore find a member bad, and none since then find it, or one that builds on it, good?"""
    good: datetime | None = None
    for record in reversed(chain):
        proofs = wiring.catalog.proofs.list(record.server, backup_id=record.id)
        bad = max((proof.finished_at for proof in proofs if _speaks_against(proof)), default=None)
        good = max(
            (found for found in (good, *(proof.finished_at for proof in proofs if proof.is_good)) if found is not None),
            default=None,
        )
        if bad is not None and (good is None or good < bad):
            yield f"the test restore of {record.id} at {format_time(bad)} failed"


def _speaks_against(proof: Proof) -> bool:
    """The data was found bad, or could be fetched and opened and then not be made to run."""
    fetched = any(phase.name == "fetched" for phase in proof.phases)
    return proof.outcome == FAILED or (proof.outcome == UNDECIDED and fetched)
