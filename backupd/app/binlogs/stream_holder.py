"""Who streams a server's binary log: what the process that holds the lock of its spool has written into the lock's
file, so that a service which did not start it knows it.

Nothing of that is believed: the lock has to be held, the process alive since the moment it says, and the installation,
the server, the settings and the program files have to be the same.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Self

from backupd.app.binlogs.quiet import USUAL
from backupd.app.context.logging_setup import log_folder
from backupd.app.context.settings import Settings, spool_folder
from backupd.app.context.wiring import Wiring, owner
from backupd.app.runtime.other_process import OtherProcess
from backupd.binlog.spool_files import Spool
from backupd.model.document import Document, json_key
from backupd.process.forking import PACKAGES, installed_files


@dataclass(frozen=True, slots=True)
class Holder(Document):
    """``owner``: the process (see ``wiring.owner``); ``installation``: the digest of its secret; ``basis``: of the
    settings that it goes by; ``code``: of the program's files; ``kept``: was it started by a service, which replaces it
    where settings or files change? ``shared``: has it other streams, too? ``activity``: how much comes, as of
    ``quiet.Activity``."""

    owner: str
    installation: str
    server: str
    basis: str
    code: str
    kept: bool
    shared: bool = field(default=False, metadata=json_key(later=True))
    activity: str = field(default=USUAL, metadata=json_key(later=True))

    @classmethod
    def current(cls, wiring: Wiring, server: str, *, kept: bool, shared: bool = False) -> Self:
        """This process."""
        basis = _digest(basis_of(wiring.settings, server))
        return cls(owner(), _installation(wiring), server, basis, code(), kept, shared)

    @classmethod
    def of(cls, wiring: Wiring, server: str) -> Self | None:
        """Who streams ``server`` into the spool of this installation, as far as that can be read."""
        said = Spool(spool_folder(wiring.settings, server)).holder()
        try:
            found = cls.from_json(json.loads(said)) if said else None
        except (ValueError, KeyError, TypeError):
            return None
        ours = found is not None and (found.installation, found.server) == (_installation(wiring), server)
        return found if ours else None

    def note(self) -> str:
        """What it writes into the lock's file."""
        return json.dumps(self.as_json())

    @property
    def pid(self) -> int:
        """Of the process."""
        return int(self.owner.split(" ")[-2])

    def process(self) -> OtherProcess | None:
        """None where it has ended."""
        return OtherProcess.of(self.owner) if self.kept else None

    def goes_by(self, basis: str) -> bool:
        """Does it go by these settings, with the files that are installed?"""
        return (self.basis, self.code) == (_digest(basis), code())

    def began_before(self, other: Holder) -> bool:
        """On one host since its last start."""
        return int(self.owner.split(" ")[-1]) <= int(other.owner.split(" ")[-1])


def basis_of(settings: Settings, name: str) -> str:
    """All of the settings that the stream of the server ``name`` goes by."""
    server, configuration = settings.server(name), settings.configuration
    policy = server.policy
    parts = [
        server.config,
        *(config for config, _file in server.ways.values()),
        policy.binlog,
        policy.destinations,
        policy.objectives,
        policy.limits,
        *server.required.values(),
        *server.others.values(),
        configuration.encryption,
    ]
    texts = [part.model_dump_json() for part in parts if part is not None]
    return json.dumps([*texts, str(settings.spool), settings.catalog, dict(settings.programs)])


@cache
def code() -> str:
    """Of the program's files, as they were when this process asked first."""
    return _digest(json.dumps(sorted(json.dumps(one) for one in installed_files(PACKAGES))))


def log_of(settings: Settings, server: str) -> Path:
    """Where the stream of a server that a service has started says what happens to it."""
    return log_folder(settings).with_name("streams") / f"{server}.log"


def log_of_shared(settings: Settings) -> Path:
    """The same of processes with several streams, beside what each of these says in its own."""
    return log_folder(settings).with_name("streams-shared.log")


def streamed(spool: Path) -> list[str]:
    """Names of servers that have a folder there."""
    try:
        return sorted(path.name for path in (spool / "binlogs").iterdir() if path.is_dir())
    except OSError:
        return []


def _installation(wiring: Wiring) -> str:
    return hashlib.sha256(b"stream " + wiring.identity_key()).hexdigest()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
