"""Can a document of record at a destination be trusted? Which have to be signed, and by whom; which the catalog knows
by their digest; and the incident where one is another than the one that was stored.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from backupd.alerts.conditions import Condition, Key
from backupd.alerts.rules import TAMPERED
from backupd.app.context.incidents import Incidents
from backupd.app.context.settings import Settings
from backupd.backup.finding import Finding, error, fine, warning
from backupd.catalog.session import Catalog
from backupd.model.backup_record import EVERY_SERVER, BackupState
from backupd.model.binlog import SegmentKey
from backupd.model.document import Document, json_key
from backupd.model.errors import BackupdError, CatalogError, NotFoundError, RefusedError, TamperedError
from backupd.model.event import Severity
from backupd.model.text import Clock
from backupd.transfer.records.authenticity import SignedDestination, Signing, problem_of, sign
from storage.config import DestinationConfig
from storage.destination import Destination

_PAGE = """\
THE RECOVERY PAGE OF {host}
Print it, and keep it outside of every destination: whoever can write to a destination can replace everything that is
there, with its signature and the key beside it. Nobody can replace this page.

Fingerprint of the signing key (SIGNER):  {key}
{replaced}{trusted}Private keys that open the backups, one of which you need:
{recipients}
Destinations that hold backups:
{destinations}
Before you read or follow RECOVER.md of a destination: fetch it with RECOVER.md.sig, import the key below, and run

{command}

Only when that prints OK: go on with RECOVER.md, with `export SIGNER={key}`.

{public}"""
_COMMAND = (
    "gpg --batch --no-options --status-fd 1 --verify RECOVER.md.sig RECOVER.md 2> /dev/null | "
    'awk -v key={key} \'$2 == "VALIDSIG" && ($3 == key || $NF == key) {{ ok = 1 }} '
    'END {{ print ok ? "OK" : "STOP: this is not what backupd wrote"; exit !ok }}\''
)
_UNSIGNED = (
    "anyone who can write to a destination and has your public key can store forged backups that a new catalog "
    "accepts, or bring back an old state"
)
_SAMPLE = b"backupd asks itself whether it can sign\n"


def trusting(settings: Settings, destination: Destination) -> Destination:
    """``destination`` as one that signs and believes as the policies say; itself where none is `signed`. Where one
    is, what is about the whole installation (copies of its catalog and configuration) is signed, too."""
    servers = signed_servers(settings)
    if not servers:
        return destination
    return SignedDestination(destination, signing(settings), (servers | {EVERY_SERVER}).__contains__)


def signed_servers(settings: Settings) -> frozenset[str]:
    """Those whose policy is `signed`, or cannot be used where keys for signatures are configured: a mistake in a
    policy must not switch off what it says."""
    return wanting(settings) | (undecided(settings) if signing(settings).trusted else frozenset())


def wanting(settings: Settings) -> frozenset[str]:
    """Those whose policy says `signed`, or does not speak of it while a signing key is named."""
    default = settings.encryption.signing_key is not None
    return frozenset(name for name, said in _said(settings).items() if (default if said is None else said))


def _said(settings: Settings) -> dict[str, bool | None]:
    """What the policy of each server, as far as it can be used, says of `signed`."""
    followed, policies = settings.followed(), settings.policies
    return {name: policies[policy].signed for name, policy in followed.items() if policy in policies}


def undecided(settings: Settings) -> frozenset[str]:
    """Those whose policy cannot be used, so that nobody knows what it says."""
    return frozenset(name for name, policy in settings.followed().items() if policy not in settings.policies)


def signing(settings: Settings) -> Signing:
    """The keyring, the key that signs here (None: nothing is signed), and the fingerprints that are trusted."""
    encryption = settings.encryption
    own = (encryption.signing_key,) if encryption.signing_key else ()
    return Signing(
        encryption.gnupg_home,
        encryption.signing_key,
        tuple(dict.fromkeys((*own, *encryption.trusted_signers))),
        encryption.signing_passphrase_file,
    )


@dataclass(frozen=True, slots=True)
class RecoveryPage(Document):
    """What has to be kept outside of the store. ``command``: says whether RECOVER.md may be believed, before it is
    read; ``text``: the whole page."""

    signing_key: str
    command: str
    text: str = field(metadata=json_key("page"))


def recovery_page(settings: Settings, replaced: Sequence[str] = ()) -> RecoveryPage:
    """``replaced``: keys that it replaces, each with until when it counted. Raises RefusedError where nothing
    is signed, ToolError, KeyUnusableError."""
    from backupd.transfer.records.keyring import public_keys

    ours = signing(settings)
    if ours.key is None:
        raise RefusedError(
            "encryption.signing_key is not set: RECOVER.md cannot be verified",
            hint="`backupd keys make-signing` makes a signing key and says what to add to the configuration",
        )
    command = _COMMAND.format(key=ours.key)
    destinations = sorted(settings.configuration.destinations.items())
    others = [key for key in ours.trusted if key != ours.key]
    return RecoveryPage(
        ours.key,
        command,
        _PAGE.format(
            host=socket.gethostname(),
            key=ours.key,
            command=command,
            public=public_keys(ours.home, ours.trusted).decode(),
            replaced="".join(f"Destroy every page of the key {one}\n" for one in replaced),
            trusted="".join(f"Also trusted:  {key}\n" for key in others),
            recipients="\n".join(f"- {one}" for one in settings.encryption.recipients),
            destinations="\n".join(f"- {name}: {_where(one)}" for name, one in destinations),
        ),
    )


def _where(config: DestinationConfig) -> str:
    space, parts = config.address
    kind, *room = (one for one in space if one)
    return f"{kind} " + "/".join((*room, *(("" if part == "/" else part) for part in parts)))


def findings(settings: Settings) -> list[Finding]:
    """What `backupd check` says about signing: is it done, can it be done here, and is it believed then?"""
    return [*_unsigned(settings), *_able(settings)]


def require_signing(settings: Settings, server: str) -> None:
    """Before anything of ``server`` is copied. Raises KeyUnusableError, RefusedError where it has to be signed and
    cannot be."""
    if server in signed_servers(settings):
        prove_signing(signing(settings))


def prove_signing(ours: Signing) -> None:
    """Raises KeyUnusableError where its key cannot sign here, RefusedError where that would not be believed."""
    if problem := problem_of(ours, _SAMPLE, sign(ours, _SAMPLE)):
        raise RefusedError(
            f"cannot verify signatures of key {ours.key}: {problem}",
            hint=f"import its public half: gpg --homedir {ours.home} --import FILE",
        )


def _unsigned(settings: Settings) -> Iterator[Finding]:
    off = sorted(name for name, said in _said(settings).items() if said is False)
    silent = sorted(name for name, said in _said(settings).items() if said is None)
    if off:
        yield warning(
            "signing",
            f"backups of {', '.join(off)} are not signed, as `signed: false` in the policy says: {_UNSIGNED}",
            "remove `signed: false` if this is not intended",
        )
    if silent and settings.encryption.signing_key is None:
        yield warning(
            "signing",
            f"backups of {', '.join(silent)} are not signed, since no signing key is named: {_UNSIGNED}",
            "`backupd keys make-signing` makes one and says what to add to the configuration; "
            "to keep backups unsigned, set `signed: false` in the policy",
        )


def _able(settings: Settings) -> Iterator[Finding]:
    servers = signed_servers(settings)
    if not servers:
        return
    ours = signing(settings)
    try:
        prove_signing(ours)
    except BackupdError as failure:
        yield error(
            "signing", f"nothing of {', '.join(sorted(servers))} can be stored: {failure.message}", failure.hint
        )
    else:
        yield fine("signing", f"manifests are signed with {ours.key}")


class CatalogRecords:
    """Implements ``transfer.recorded.Records``. Without the catalog nothing is known: what is archived meanwhile, and
    what is read of it, goes on."""

    def __init__(self, catalog: Catalog, clock: Clock) -> None:
        self._catalog, self._clock = catalog, clock

    def manifest(self, backup_id: str) -> str:
        """SHA-256 of a backup's manifest as it was committed, "" where the catalog has none."""
        with contextlib.suppress(CatalogError):
            return self._catalog.backups.digest(backup_id)
        return ""

    def segment(self, server: str, key: SegmentKey) -> str:
        """SHA-256 of the document of an archived piece of a binary log, "" where the catalog has none."""
        with contextlib.suppress(CatalogError):
            return self._catalog.binlogs.digest(server, key)
        return ""

    def differs(self, destination: str, server: str, backup_id: str, error: TamperedError) -> None:
        """A document at a destination is not the recorded one: report it as tampering."""
        with contextlib.suppress(CatalogError):
            report_tampering(self._catalog, self._clock, destination, server, backup_id, error)


def report_tampering(
    catalog: Catalog, clock: Clock, destination: str, server: str, backup_id: str, error: TamperedError
) -> None:
    """An incident, and the copy counts as damaged. It is over when a verification finds nothing like it any more."""
    if backup_id:
        mark_copy_damaged(catalog, backup_id, destination)
    key = Key(TAMPERED, server, destination)
    Incidents(catalog).settle(clock(), Condition(key, Severity.ERROR, error.message, error.detail, error.hint))


def mark_copy_damaged(catalog: Catalog, backup_id: str, destination: str) -> None:
    """A copy that is not as it was stored; without a whole one the backup is damaged."""
    with contextlib.suppress(NotFoundError):  # one that has no row, or none there, yet: fsck says so
        catalog.backups.mark_copy_damaged(backup_id, destination)
        record = catalog.backups.get(backup_id)
        if record.state is BackupState.COMPLETE and all(copy.state != "complete" for copy in record.copies):
            catalog.backups.set_state(backup_id, BackupState.DAMAGED)


def settle_tampering(catalog: Catalog, clock: Clock, destination: str, server: str, left: Iterable[str]) -> None:
    """After every document of ``server`` there was read: ``left`` are the keys of those that are damaged still."""
    if not any(left):
        well = f"every document of {server} at {destination} is as backupd stored it"
        Incidents(catalog).settle(clock(), looked={Key(TAMPERED, server, destination): well})
