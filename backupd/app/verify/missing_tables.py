"""Stored physical backups that lack files of tables which the server had: what one of them lacks is marked in the
catalog, its proofs are withdrawn, and one incident of its server names them all.

Manifests that list the tables of their moment say it themselves. For older ones the witness of the backup says which
tables there were, so each is looked at once. That needs the private key, since file names are sealed: where it is not
configured nothing is looked at here, and a test restore elsewhere finds it.

Two things in older manifests speak against every restore, though neither is proof: InnoDB tables without a file (the
tool refuses to prepare), and tables that exchanged their names while an increment was taken (it may). Such a backup,
and one of which a restore found itself without tables though each stored byte was right, is
doubtful, with all that builds on it: no timeline promises it, nothing is built on it, and it counts for no rule of
retention until a test restore of it, or of what builds on it, has worked.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from backupd.alerts.conditions import Key
from backupd.alerts.rules import PARTIAL
from backupd.app.context.logging_setup import say
from backupd.app.context.wiring import Wiring
from backupd.engine.physical.tablefiles import absent
from backupd.engine.server.probe import is_copied
from backupd.model.backup_record import BackupKind, BackupRecord, BackupState
from backupd.model.document import Document
from backupd.model.errors import BackupdError, UnrestorableError
from backupd.model.event import Severity
from backupd.model.manifest import Body
from backupd.model.proof import Witness
from backupd.model.table import BaseTable, TableName
from backupd.model.text import few
from backupd.recovery.chains import dependants
from backupd.transfer.records.manifests import load_body, load_header
from storage import layout

_ENGINE, _SEQUENCE, _REASONS = "engine ", "a sequence", ("not reached within", "the server's history list")
_INNODB = "InnoDB"
_NAMED = 20


@dataclass(frozen=True, slots=True)
class IncompleteBackup(Document):
    """``tables`` of which files are not in the backup, as people write them; ``doubtful``: see ``BackupRecord``."""

    server: str
    backup: str
    tables: tuple[str, ...]
    doubtful: str = ""

    def __str__(self) -> str:
        names = f"{len(self.tables)} tables are not in it: {few(self.tables, _NAMED)}"
        if not self.tables:
            names = ""
        return f"{self.backup} of {self.server}: {'; '.join(filter(None, (names, self.doubtful)))}"


def look_back(wiring: Wiring, server: str | None = None) -> tuple[IncompleteBackup, ...]:
    """Look at each backup (of ``server``) that nobody looked at; gives every one that is known to lack tables, or to be
    doubtful. What cannot be read now is looked at the next time. Raises CatalogError."""
    found: list[IncompleteBackup] = []
    for name in [server] if server is not None else wiring.catalog.backups.servers():
        records = wiring.catalog.backups.list(name)
        for record in records:
            if (
                record.missing is None
                and record.kind is not BackupKind.LOGICAL
                and (record.state is not BackupState.DELETED)
            ):
                _examine(wiring, record, records)
        known = [
            IncompleteBackup(name, one.id, one.missing or (), one.doubtful)
            for one in wiring.catalog.backups.list(name)
            if one.state is not BackupState.DELETED and (one.missing or one.doubtful)
        ]
        _report(wiring, name, known)
        found += known
    return tuple(found)


def doubt(wiring: Wiring, backup_id: str, error: BackupdError) -> None:
    """A restore of the backup has ended with ``error``: where that speaks against the backup itself, it is doubtful.
    Raises CatalogError."""
    if isinstance(error, UnrestorableError):
        record = wiring.catalog.backups.get(backup_id)
        wiring.catalog.backups.set_missing(
            record.id, record.missing or (), f"a restore of it failed: {', '.join(error.damages[:_NAMED])}"
        )


def settle_doubts(wiring: Wiring, chain: Iterable[str]) -> None:
    """A test restore of the last of ``chain`` has worked: so does what it builds on. Raises CatalogError."""
    for backup_id in chain:
        record = wiring.catalog.backups.get(backup_id)
        if record.doubtful:
            wiring.catalog.backups.set_missing(record.id, record.missing or (), "")


def witnessed(witness: Witness) -> Iterator[BaseTable]:
    """Base tables that a witness names, with their engines where it names them. Tables of a witness that was lost from
    sight while it was read (dropped, renamed) are left out: nobody knows whether they were there."""
    if witness.definitions is not None:
        for kind in ("table", "sequence"):
            yield from (BaseTable(TableName.parse(name), "") for name in witness.definitions.get(kind, ()))
        return
    yield from (BaseTable(TableName.parse(name), _INNODB) for name in witness.checksums)
    for name, why in witness.uncovered.items():
        if why.startswith(_ENGINE):
            yield BaseTable(TableName.parse(name), why.removeprefix(_ENGINE).partition(":")[0])
        elif why.startswith(_SEQUENCE):
            yield BaseTable(TableName.parse(name), "")
        elif why.startswith(_REASONS):
            yield BaseTable(TableName.parse(name), _INNODB)


def missing_tables(body: Body, witness: Witness | None) -> tuple[BaseTable, ...] | None:
    """Those that the backup's moment had, by its own list or the witness, and of which it lacks files; None where
    nothing says which tables there were."""
    facts = body.facts
    if facts.inventory is None and witness is None:
        return None
    listed = facts.inventory if facts.inventory is not None else witnessed(witness) if witness is not None else ()
    copied = [table for table in listed if is_copied(table.engine, facts.server.flavour, facts.tool.name)]
    gone = {table.name for table in absent(copied, [entry.path for entry in body.entries])}
    return tuple(table for table in copied if table.name in gone | set(facts.missing))


def exchanged(body: Body) -> tuple[str, ...]:
    """Tables that were renamed while the tool ran, and whose old names are those of tables again, where there are two
    of them: they may have been exchanged. Only where definitions are files."""
    paths = {entry.path for entry in body.entries}
    renamed = sorted(path.removesuffix(".ren") for path in paths if path.endswith(".ren"))
    found = [stem for stem in renamed if f"{stem.partition('#')[0]}.frm" in paths and f"{stem}.new" not in paths]
    return tuple(found) if len(found) > 1 else ()


def _examine(wiring: Wiring, record: BackupRecord, records: Sequence[BackupRecord]) -> None:
    body = _body(wiring, record)
    if body is None:
        return
    missing = missing_tables(body, wiring.catalog.witnesses.of_backup(record.id))
    names = tuple(table.name.shown for table in missing or ())
    doubtful = ""
    if any(table.engine == _INNODB for table in missing or ()):
        doubtful = "InnoDB tables are missing from it: prepare will probably fail"
    elif record.kind is BackupKind.PHYSICAL_INCREMENTAL and body.facts.inventory is None and (pairs := exchanged(body)):
        doubtful = (
            f"{', '.join(pairs[:_NAMED])} were renamed while it was taken and may have exchanged their names, "
            "which the tool may not be able to prepare"
        )
    if doubtful and _worked(wiring, record, records):
        doubtful = ""
    wiring.catalog.backups.set_missing(record.id, names, doubtful)
    if names:
        _withdraw(
            wiring,
            record,
            f"{len(names)} tables of the server are not in backup {record.id}: {', '.join(names[:_NAMED])}",
        )


def _body(wiring: Wiring, record: BackupRecord) -> Body | None:
    if wiring.settings.restore is None:
        return None
    for copy in record.copies:
        if copy.state != str(BackupState.COMPLETE):
            continue
        try:
            destination = wiring.destination(copy.destination)
            return load_body(destination, load_header(destination, record.server, record.id), wiring.unsealer())
        except BackupdError as error:
            say(
                "look-back",
                f"the manifest of {record.id} at {copy.destination} cannot be read: {error.message}",
                level=logging.WARNING,
            )
    return None


def _worked(wiring: Wiring, record: BackupRecord, records: Sequence[BackupRecord]) -> bool:
    """Was it prepared before, alone or below what builds on it?"""
    family = {record.id, *(one.id for one in dependants(record.id, records))}
    return any(proof.is_good and proof.backup_id in family for proof in wiring.catalog.proofs.list(record.server))


def _withdraw(wiring: Wiring, record: BackupRecord, why: str) -> None:
    for proof in wiring.catalog.proofs.list(record.server, backup_id=record.id):
        if proof.is_good:
            wiring.catalog.proofs.withdraw(proof.id, f"it was {proof.outcome}; {why}")
            for name in wiring.settings.destinations:  # so that it is stored anew, as what it is now
                wiring.catalog.deposits.forget(name, [layout.proof_key(record.server, proof.id)])


def _report(wiring: Wiring, server: str, known: Sequence[IncompleteBackup]) -> None:
    key = Key(PARTIAL, server)
    if not known:
        wiring.settle(looked={key: f"every backup of {server} that is left holds all its tables"})
        return
    tables = sorted({name for one in known for name in one.tables})
    what = f": {', '.join(tables[:5])}{' ...' if len(tables) > 5 else ''}" if tables else ""
    wiring.alert(
        key,
        Severity.ERROR,
        f"{len(known)} stored backups of {server} lack tables that the server had, or may not be restorable{what}",
        detail="\n".join(map(str, known)),
        hint=f"backupd backup {server} --kind full, then backupd test-restore {server}; to delete an unwanted "
        f"one: backupd backups delete ID",
    )
