"""Which documents of record have to be signed here, and by whom."""

from __future__ import annotations

from backupd.app.settings import Settings
from backupd.backup.finding import Finding, error, fine
from backupd.model.errors import BackupdError
from backupd.model.hold import EVERY_SERVER
from backupd.transfer.signature import Signing, problem_of, sign
from backupd.transfer.signed import SignedDestination
from storage.destination import Destination

_SAMPLE = b"backupd asks itself whether it can sign\n"


def trusting(settings: Settings, destination: Destination) -> Destination:
    """``destination`` as one that signs and believes as the policies say; itself where none says `signed`. Where one
    does, what is about the whole installation (copies of its catalog and configuration) is signed, too."""
    servers = signed_servers(settings)
    if not servers:
        return destination
    return SignedDestination(destination, signing(settings), (servers | {EVERY_SERVER}).__contains__)


def signed_servers(settings: Settings) -> frozenset[str]:
    """Those whose policy says `signed`, or cannot be used where keys for signatures are configured: a mistake in a
    policy must not switch off what it says."""
    return wanting(settings) | (undecided(settings) if signing(settings).trusted else frozenset())


def wanting(settings: Settings) -> frozenset[str]:
    """Those whose policy says `signed`."""
    return frozenset(name for name in settings.servers
                     if (server := settings.server(name)).usable and server.policy.signed)


def undecided(settings: Settings) -> frozenset[str]:
    """Those whose policy cannot be used, so that nobody knows what it says."""
    return frozenset(name for name in settings.servers if not settings.server(name).usable)


def signing(settings: Settings) -> Signing:
    encryption = settings.encryption
    own = (encryption.signing_key,) if encryption.signing_key else ()
    return Signing(encryption.gnupg_home, encryption.signing_key,
                   tuple(dict.fromkeys((*own, *encryption.trusted_signers))), encryption.signing_passphrase_file)


def findings(settings: Settings) -> list[Finding]:
    """What `backupd check` says about signing: can it be done here, and is it believed then?"""
    servers = signed_servers(settings)
    if not servers:
        return []
    ours = signing(settings)
    try:
        problem = problem_of(ours, _SAMPLE, sign(ours, _SAMPLE))
    except BackupdError as failure:
        return [error("signing", f"nothing of {', '.join(sorted(servers))} can be stored: {failure.message}",
                      failure.hint)]
    if problem:
        return [error("signing", f"what is signed here is not believed here: {problem}",
                      f"import the public key: gpg --homedir {ours.home} --import FILE")]
    return [fine("signing", f"manifests are signed with {ours.key}")]
