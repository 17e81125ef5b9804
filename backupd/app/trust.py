"""Which documents of record have to be signed here, and by whom."""

from __future__ import annotations

from backupd.app.settings import Settings
from backupd.backup.finding import Finding, error, fine
from backupd.model.errors import BackupdError
from backupd.transfer.signature import Signing, problem_of, sign
from backupd.transfer.signed import SignedDestination
from storage.destination import Destination

_SAMPLE = b"backupd asks itself whether it can sign\n"


def trusting(settings: Settings, destination: Destination) -> Destination:
    """``destination`` as one that signs and believes as the policies say; itself where none says `signed`."""
    servers = signed_servers(settings)
    return SignedDestination(destination, signing(settings), servers.__contains__) if servers else destination


def signed_servers(settings: Settings) -> frozenset[str]:
    return frozenset(name for name in settings.servers
                     if (server := settings.server(name)).usable and server.policy.signed)


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
