"""An installation whose every document is the same each time: three servers with a month of history at one moment, ids
that count, and neither a server nor a clock that answers anything else."""

from __future__ import annotations

import itertools
import json
import os
import re
import socket
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from backupd.app.context.settings import Settings, load_settings
from backupd.app.context.wiring import Wiring
from backupd.app.service.facade import Service
from backupd.catalog.session import open_catalog
from backupd.model.text import parse_time
from tests.support.e2e.house import SERVER
from tests.support.keys import Keys, gpg, make_home, stop_agent
from tests.support.service import rig
from tests.support.service.house import Clock
from tests.support.service.stage import Stage, settings_of
from tests.support.stores.folders import short_directory

NOW = datetime(2026, 11, 21, 14, 30, tzinfo=UTC)
FROZEN = Path(__file__).parent.parent / "formats" / "version-1-inventories"
_HEARTBEAT = re.compile(r'"heartbeat_at": "[^"]*"')
_OWNER = re.compile(re.escape(socket.gethostname()) + r" [0-9a-f-]{36} pid:\[\d+\] \d+ \d+")


def countable(patch: pytest.MonkeyPatch) -> None:
    """Let ids and secrets count from one, and every disk be as large as any other."""
    numbers = itertools.count(1)
    patch.setattr(rig, "_names", itertools.count(1))
    patch.setattr("backupd.app.views.standings.BUDGET", 3600.0)  # a slow machine looks at every server, too
    blocks = (4096, 4096, 2**28, 2**27, 2**27, 2**20, 2**19, 2**19, 0, 255)
    patch.setattr("os.statvfs", lambda _path: os.statvfs_result(blocks))
    patch.setattr("secrets.token_hex", lambda size=4: f"{next(numbers):0{2 * size}x}")
    patch.setattr("secrets.token_urlsafe", lambda _size=32: f"secret-{next(numbers)}")


def told(text: str, base: Path) -> str:
    """Without what is of this machine, this process or this folder."""
    text = _OWNER.sub("OWNER", text.replace(str(base), "BASE"))
    return _HEARTBEAT.sub('"heartbeat_at": "*"', text)


def pretty(document: Any) -> str:
    return json.dumps(document, indent=1, ensure_ascii=False, sort_keys=False)


@contextmanager
def staged(base: Path) -> Iterator[tuple[Settings, Service, Stage]]:
    """Everything that a catalog can hold; the destinations are bare."""
    settings = settings_of(base)
    with open_catalog(settings.catalog) as catalog:
        wiring = Wiring(settings, catalog, Clock(NOW))
        yield settings, Service(wiring, ""), Stage(wiring).set().mount()


@contextmanager
def frozen(base: Path) -> Iterator[tuple[Settings, Service, dict[str, Any], datetime]]:
    """A repository that was taken once and for all, beside an empty catalog; its facts, and a moment after it."""
    facts = json.loads((FROZEN / "facts.json").read_text())
    with tarfile.open(FROZEN / "plain.tar") as archive:
        archive.extractall(base / "repository", filter="tar")
    with short_directory("bt-golden-") as home:
        secret = make_home(home / "secret")
        try:
            gpg(secret, "--import", str(FROZEN / "key.asc"))
            (base / "policies").mkdir()
            (base / "policies" / "gold.yaml").write_text(
                'physical: {full: "0 2 * * *"}\ndestinations: {required: [local]}\n'
            )
            file = base / "backupd.yaml"
            file.write_text(
                f"host: backup1\ncatalog: sqlite:///{base}/catalog.db\nspool: {base}/spool\n"
                f"servers:\n  {SERVER}: {{socket: {base}/no.sock, user: nobody, policy: gold}}\n"
                f"destinations:\n  local: {{type: filesystem, path: {base}/repository}}\n"
                f"encryption: {{gnupg_home: {secret}, recipients: [{Keys.user_id}]}}\n"
                f"restore: {{gnupg_home: {secret}, folders: [{base}]}}\n"
            )
            settings = load_settings(file)
            after = parse_time(facts["plain"]["moment"]) + timedelta(days=1)
            with open_catalog(settings.catalog) as catalog:
                yield settings, Service(Wiring(settings, catalog, Clock(after)), ""), facts["plain"], after
        finally:
            stop_agent(secret)
