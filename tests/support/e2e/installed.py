"""A house laid out as docs/installing.md has it, beneath its own base, and what confines a service as its unit does."""

from __future__ import annotations

import shutil
from pathlib import Path

from backupd.engine.server.sandbox import is_available
from tests.support.e2e.house import House
from tests.support.keys import Keys, make_key, stop_agent
from tests.support.service.systemd_unit import confined

STATE, REPOSITORY, RESTORES, RUN, ETC = (
    "var/lib/backupd",
    "srv/backups/repository",
    "srv/restores",
    "run/backupd",
    "etc/backupd",
)
_OF_ONE_HOME = shutil.ignore_patterns("S.*", "*.lock", ".#*")


def install(house: House, keys: Keys) -> list[str]:
    """Rewrite the configuration, with a key that signs; gives the words before a program that confine it as the unit
    does, none where bubblewrap cannot be used. No agent runs for the two GnuPG homes."""
    public, secret = homes(house)
    public.parent.mkdir(parents=True)
    shutil.copytree(keys.public_home, public, ignore=_OF_ONE_HOME)
    shutil.copytree(keys.secret_home, secret, ignore=_OF_ONE_HOME)
    signer = make_key(public, "signer@example.com", encryption=False)
    stop_agent(public)
    house.write(encryption_home=public, restore_home=secret, repository=house.base / REPOSITORY)
    text = house.config.read_text()
    for name in ("catalog.db", "spool", "scratch"):
        text = text.replace(f"{house.base}/{name}", f"{house.base}/{STATE}/{name}")
    text = text.replace("encryption: {", f"encryption: {{signing_key: {signer}, ")
    text = text.replace("restore: {", f"restore: {{folders: [{house.base / RESTORES}], ")
    house.config.write_text(text)
    house.env["BACKUPD_RUNTIME"] = str(house.base / RUN)
    words = confined(house.base)  # which makes the folders, too
    return words if is_available() else []


def homes(house: House) -> tuple[Path, Path]:
    """GnuPG's with the public keys and the one that signs, and that with the private key."""
    return house.base / ETC / "gnupg", house.base / ETC / "gnupg-restore"
