"""Which backups depend on which keys, by what their manifests say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from backupd.app.context.wiring import Wiring
from backupd.model.backup_record import BackupState
from backupd.model.errors import BackupdError, KeyUnusableError
from backupd.model.manifest import Header
from backupd.transfer.records.manifests import load_header
from backupd.transfer.seal.keyring import secret_fingerprints

_NAMED = 20


@dataclass(frozen=True, slots=True)
class Dependence:
    """``total``: backups that a key opens; ``alone``: those of them that no other key opens."""

    total: int
    alone: int


def dependence(wiring: Wiring) -> dict[str, Dependence]:
    """By fingerprint. Reads one manifest of each backup; those that cannot be read are not counted."""
    found: dict[str, Dependence] = {}
    for header in _headers(wiring):
        for fingerprint in header.recipients:
            before = found.get(fingerprint, Dependence(0, 0))
            found[fingerprint] = Dependence(before.total + 1, before.alone + (len(header.recipients) == 1))
    return found


def require_keys(wiring: Wiring, server: str, backup_ids: Sequence[str]) -> None:
    """Raises KeyUnusableError unless the restore keyring opens each of these backups: before anything is fetched, and
    with the names of all that the missing keys are needed for."""
    home = wiring.settings.needs_restore().gnupg_home
    here = secret_fingerprints(home)
    closed = [header for header in _headers(wiring, server, backup_ids) if not here & set(header.recipients)]
    if not closed:
        return
    missing = {fingerprint for header in closed for fingerprint in header.recipients}
    needing = sorted(
        header.backup_id
        for header in _headers(wiring)
        if missing & set(header.recipients) and not here & set(header.recipients)
    )
    shown = ", ".join(needing[:_NAMED]) + (f" and {len(needing) - _NAMED} more" if len(needing) > _NAMED else "")
    raise KeyUnusableError(
        f"{', '.join(header.backup_id for header in closed)} cannot be opened here: it is sealed for "
        f"{', '.join(sorted(missing))}, and no secret key of these is in {home}",
        detail=f"backups that need one of these keys: {shown}",
        hint=f"import the old secret key, too: gpg --homedir {home} --import FILE",
    )


def _headers(wiring: Wiring, server: str | None = None, backup_ids: Sequence[str] | None = None) -> Iterator[Header]:
    names: Mapping[str, None] | None = dict.fromkeys(backup_ids) if backup_ids is not None else None
    for record in wiring.catalog.backups.list(server):
        if record.state is BackupState.DELETED if names is None else record.id not in names:
            continue
        for copy in record.copies:
            try:
                yield load_header(wiring.destination(copy.destination), record.server, record.id)
            except BackupdError:
                continue  # another copy may be readable; verify and fsck tell of this one
            break
