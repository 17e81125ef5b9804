"""An installation whose policy wants everything signed from now on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from backupd.app.context.settings import load_settings
from backupd.app.context.wiring import Wiring
from tests.support.keys import make_home, make_key, stop_agent
from tests.support.stores.folders import short_directory


@contextmanager
def signing(wiring: Wiring, *, opens: bool = False) -> Iterator[Wiring]:
    """The same installation, which signs, and seals for the key that signs. ``opens``: restores have that key, too,
    instead of their own."""
    with short_directory("bt-sign-") as base:
        home = make_home(base / "home")
        try:
            key = make_key(home, "signer@example.com")
            settings = wiring.settings
            (settings.configuration.policies / "gold.yaml").write_text(
                'physical: {full: "0 2 * * *"}\nsigned: true\ndestinations: {required: [local, offsite]}\n'
            )
            text = settings.file.read_text()
            if opens:
                text = text.replace(str(restore_home(wiring)), str(home))
            begin = text.index("encryption:")
            end = text.index("\n", begin)
            settings.file.write_text(
                f"{text[:begin]}encryption: {{gnupg_home: {home}, recipients: [signer@example.com], "
                f"signing_key: {key}}}{text[end:]}"
            )
            yield Wiring(load_settings(settings.file), wiring.catalog, wiring.clock)
        finally:
            stop_agent(home)


def restore_home(wiring: Wiring) -> Path:
    return wiring.settings.needs_restore().gnupg_home
