"""Where a restore reads: the manifests of a chain, each from the first destination where it is good, and the pins."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from backupd.model.clock import Clock
from backupd.model.errors import BackupdError, DamagedError, DestinationError, NotFoundError, RefusedError
from backupd.model.manifest import Body, Header
from backupd.transfer.manifestio import load_body, load_header
from backupd.transfer.pin import Pin
from backupd.transfer.unseal import Unsealer
from restore.names import check_entries
from storage.destination import Destination


@dataclass(frozen=True, slots=True)
class Loaded:
    """One backup of the chain, its entries judged."""

    header: Header
    body: Body


def load_chain(
    server: str, chain: Sequence[str], destinations: Sequence[Destination], unsealer: Unsealer
) -> tuple[tuple[Loaded, ...], tuple[str, ...]]:
    """The manifests of ``chain`` and what there is to say about copies that could not be used.

    Raises DamagedError naming every bad copy when none is good, NotFoundError, DestinationError, and
    KeyUnusableError when the private key for the backup is not here.
    """
    loaded: list[Loaded] = []
    warnings: list[str] = []
    for backup_id in chain:
        found, said = _load(server, backup_id, destinations, unsealer)
        check_entries(found.header, found.body)
        loaded.append(found)
        warnings += said
    return tuple(loaded), tuple(warnings)


def _load(
    server: str, backup_id: str, destinations: Sequence[Destination], unsealer: Unsealer
) -> tuple[Loaded, list[str]]:
    failures: list[BackupdError] = []
    for destination in destinations:
        try:
            header = load_header(destination, server, backup_id)
            body = load_body(destination, header, unsealer)
        except (DamagedError, DestinationError, NotFoundError) as error:
            failures.append(error)
            continue
        return Loaded(header, body), [_line(error) for error in failures]
    damages = [line for error in failures if isinstance(error, DamagedError) for line in error.damages]
    if damages:
        others = [_line(error) for error in failures if not isinstance(error, DamagedError)]
        raise DamagedError(
            f"no good copy of the manifest of backup {backup_id} was found",
            damages + others,
            hint="restore another backup; `backupd verify` says what else is damaged",
        )
    raise failures[0] if failures else NotFoundError(f"no destination is configured for backup {backup_id}")


@contextlib.contextmanager
def pinned(
    destinations: Sequence[Destination], restore_id: str, backups: Sequence[tuple[str, str]], *, clock: Clock
) -> Iterator[tuple[str, ...]]:
    """Keep the backups from being swept away wherever they are read; yields warnings.

    A destination that cannot be written (a read-only copy after a disaster) is read without a pin. Raises
    NotFoundError or RefusedError when no destination can give the backups any more.
    """
    warnings: list[str] = []
    refused: list[BackupdError] = []
    with contextlib.ExitStack() as pins:
        for destination in destinations:
            try:
                pins.enter_context(Pin(destination, restore_id, backups, clock=clock))
            except (NotFoundError, RefusedError) as error:
                refused.append(error)
            except DestinationError as error:
                warnings.append(f"not pinned at {destination.name}: {_line(error)}")
        if refused and len(refused) == len(destinations):
            raise refused[0]
        yield (*warnings, *(_line(error) for error in refused))


def _line(error: BackupdError) -> str:
    return " ".join(f"{error.message} {error.detail}".split())
