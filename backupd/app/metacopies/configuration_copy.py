"""The configuration as one file: what the operator wrote, the policies, and the public keys. No secret is in it, since
none may stand in these files."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from backupd.app.context.settings import Settings
from backupd.model.errors import RefusedError
from backupd.transfer.seal.keyring import public_keys

CONFIGURATION = "backupd.yaml"
POLICIES = "policies/"
KEYS = "public-keys.asc"


def configuration_tar(settings: Settings, recipients: Sequence[str]) -> bytes:
    """The same bytes as long as nothing has changed. Raises RefusedError for a file that cannot be read, ToolError."""
    encryption = settings.encryption
    signers = [*([encryption.signing_key] if encryption.signing_key else []), *encryption.trusted_signers]
    output = io.BytesIO()
    with tarfile.open(fileobj=output, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, content in (*_files(settings), (KEYS, public_keys(encryption.gnupg_home, [*recipients, *signers]))):
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content), 0o600
            tar.addfile(member, io.BytesIO(content))
    return output.getvalue()


def _files(settings: Settings) -> Iterator[tuple[str, bytes]]:
    yield CONFIGURATION, _read(settings.file)
    folder = settings.configuration.policies
    try:
        files = sorted(folder.glob("*.yaml"))
    except OSError as error:
        raise _unreadable(folder, error) from error
    for file in files:
        yield POLICIES + file.name, _read(file)


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise _unreadable(file, error) from error


def _unreadable(path: Path, error: OSError) -> RefusedError:
    return RefusedError(
        f"{path} cannot be copied to the destinations: {error.strerror or error}",
        hint="this user must be able to read the configuration and its policies",
    )
