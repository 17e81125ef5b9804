"""The house burns down: backup host, catalog and database are gone. From one destination and the private key alone, by
following the text that lies there word for word, everything comes back."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from backupd.model.text import format_time
from tests.support import sample
from tests.support.e2e.archived import Archive
from tests.support.e2e.house import BACKUPD, SERVER, House
from tests.support.keys import Keys, copy_public, gpg, make_home, make_key, stop_agent
from tests.support.sample import checksum_everything
from tests.support.servers.mariadb import PrivateServer
from tests.support.servers.server import Server
from tests.support.servers.stacks import MARIADB, MYSQL, STACKS, Stack, stacks, whole
from tests.support.stores.folders import short_directory
from tests.support.stores.s3_server import S3Server

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a restored copy is given to the server's user")
_PASSING = {
    "at",
    "now",
    "behind_seconds",
    "rpo_seconds",
    "achieved_rpo",
    "rpo_kept",
    "kept",
    "predicted_rto",
    "estimated_seconds",
    "estimates",
    "free_bytes",
    "memory",
}
"""What depends on the moment at which, or the machine on which, it is asked."""


def lasting(document: Any) -> Any:
    """Without what passes."""
    if isinstance(document, dict):
        return {name: lasting(value) for name, value in document.items() if name not in _PASSING}
    return [lasting(item) for item in document] if isinstance(document, list) else document


def same(one: Any, other: Any) -> bool:
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


@dataclass
class Before:
    """What was known, and what the tables held at ``moment`` and at the end."""

    shown: dict[str, Any]
    moment: datetime
    then: dict[str, int]
    last: dict[str, int]
    env: dict[str, str] = field(default_factory=dict)


def sums(server: Server) -> dict[str, int]:
    with server.connect() as connection:
        return checksum_everything(connection)


def shown(house: House) -> dict[str, Any]:
    return {
        "backups": lasting(house.ok("backups", SERVER)),
        "timeline": lasting(house.ok("timeline", SERVER)),
        "plan": lasting(house.ok("plan", SERVER, "--to", "latest")),
    }


def lived(house: House, server: Server, *, proved: bool = False) -> Before:
    """A day of a server's life, backed up: a full backup, an increment, binary logs, and a test restore."""
    house.backup()
    server.execute(
        "CREATE TABLE shop.later (id INT PRIMARY KEY) ENGINE=InnoDB",
        "INSERT INTO shop.later VALUES (1)",
        "FLUSH BINARY LOGS",
    )
    house.ok("backup", SERVER, "--kind", "incremental")
    server.execute("INSERT INTO shop.later VALUES (2)")
    then = sums(server)
    moment = datetime.now(UTC)
    server.execute("DO SLEEP(1.1)", "INSERT INTO shop.later VALUES (3)")
    Archive(house, server).take()
    if proved:
        assert house.ok("test-restore", SERVER)["outcome"] == "proved"
    house.ok("catalog", "copy")
    return Before(shown(house), moment, then, sums(server))


@contextmanager
def signer(keys: Keys) -> Iterator[tuple[Path, str]]:
    """A GnuPG home with a secret key that signs, and the public key that backups are sealed for."""
    with short_directory("bt-sign-") as base:
        home = make_home(base / "home")
        try:
            copy_public(keys.public_home, home)
            yield home, make_key(home, "signer@example.com", encryption=False)
        finally:
            stop_agent(home)


@contextmanager
def private_key(keys: Keys) -> Iterator[Path]:
    """What lay in the safe: a GnuPG home with nothing but the private key."""
    with short_directory("bt-safe-") as base:
        home = make_home(base / "gnupg")
        try:
            gpg(home, "--import", stdin=gpg(keys.secret_home, "--export-secret-keys", keys.user_id))
            yield home
        finally:
            stop_agent(home)


def followed(blocks: list[str], env: dict[str, str], base: Path, *, programs: str = f"{Path(BACKUPD).parent}:") -> str:
    """Execute shell blocks of the text as one script, as somebody who copies them one after the other; what it says."""
    done = subprocess.run(
        ["sh", "-c", "\n".join(blocks)],
        capture_output=True,
        text=True,
        check=False,
        cwd=base,
        env={"PATH": programs + os.environ["PATH"], "BACKUPD_RUNTIME": str(base / "run"), "HOME": str(base), **env},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


def drill(
    house: House,
    before: Before,
    keys: Keys,
    text: str,
    to: str,
    expected: dict[str, int],
    stack: Stack = MARIADB,
    page: str = "",
) -> None:
    """On a machine that has nothing but the database's programs: the text, the destination and the key. With backupd,
    and without it. ``page``: the recovery page, as it was printed."""
    database = f"{stack.path()}:"
    programs = f"{Path(BACKUPD).parent}:{database}"
    with short_directory("bt-new-") as new, private_key(keys) as safe:
        if page:
            gpg(safe, "--import", stdin=page.encode())
        datadir, base = new / "data", new / "r"
        settings = {"GNUPGHOME": str(safe), "DATADIR": str(datadir), "BASE": str(base), "TO": to}
        blocks = [part.partition("\n```\n")[0] for part in text.split("\n```sh\n")[1:]]
        first, *between, restore, by_hand = blocks
        alone = {**settings, **before.env, "DATADIR": f"{datadir}-alone", "BASE": f"{base}-alone"}
        done = followed([first, by_hand], alone, new, programs=database)
        assert f"is restored, to {to}" in done
        with stack.make(datadir=Path(alone["DATADIR"])) as restored:
            assert sums(restored) == expected
        followed([first, *between], {**settings, **before.env}, new, programs=programs)
        house.config = base / "backupd.yaml"
        house.env |= {**before.env, "PATH": programs + os.environ["PATH"]}
        assert same(shown(house), before.shown)  # before a restore makes known how fast this machine is
        followed([first, between[-2], restore], {**settings, **before.env}, new, programs=programs)
        with stack.make(datadir=datadir) as restored:
            assert sums(restored) == expected


@pytest.fixture
def base(short_tmp: Path) -> Path:
    return short_tmp


@pytest.mark.parametrize("stack", stacks(*whole(*STACKS)))
def test_from_a_folder_whose_manifests_are_signed_a_moment_between_two_backups_comes_back(
    stack: Stack, base: Path, keys: Keys
) -> None:
    with stack.make() as server, signer(keys) as (home, key):
        server.create_backup_users()
        sample.create(server)
        house = House(base, server, keys, policy_extra="signed: true\n", programs=stack.all_programs())
        house.write(encryption_home=home)
        house.config.write_text(house.config.read_text().replace("recipients: [", f"signing_key: {key}, recipients: ["))
        before = lived(house, server, proved=True)
        text = (house.repository / "RECOVER.md").read_text()
        assert key in text
        for secret in ("accounts", "letters", "shop.later"):
            assert secret not in text
        page = house.ok("keys", "page")["page"]
        kept = base.parent / f"{base.name}-kept"
        house.repository.rename(kept)
    try:
        for path in base.iterdir():  # catalog, spool, configuration: all of it burns
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        before.env.update(REPOSITORY=str(kept), SIGNER=key)
        drill(house, before, keys, text, format_time(before.moment), before.then, stack, page)
    finally:
        shutil.rmtree(kept)


def test_from_a_bucket_a_moment_after_the_last_backup_comes_back_with_backupd_and_by_hand(
    base: Path, keys: Keys, s3_server: S3Server
) -> None:
    bucket = {name: str(value) for name, value in s3_server.bucket("disaster").items()}
    with PrivateServer() as server:
        server.create_backup_users()
        sample.create(server)
        house = House(base, server, keys)
        place = json.dumps({**bucket, "prefix": "prod"})
        house.config.write_text(
            "\n".join(
                f"destinations: {{local: {place}}}" if line.startswith("  local:") else line
                for line in house.config.read_text().splitlines()
                if not line.startswith("destinations:")
            )
        )
        before = lived(house, server)
    for path in base.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    before.env["AWS_SHARED_CREDENTIALS_FILE"] = bucket["credentials_file"]
    text = subprocess.run(
        [
            "aws",
            "--endpoint-url",
            bucket["endpoint_url"],
            "--region",
            bucket["region"],
            "s3",
            "cp",
            "s3://disaster/prod/RECOVER.md",
            "-",
        ],
        env={**os.environ, **before.env},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    drill(house, before, keys, text, format_time(before.moment), before.then)


@pytest.mark.parametrize("stack", stacks(*MYSQL))
def test_of_mysql_everything_that_was_known_is_known_again(stack: Stack, base: Path, keys: Keys) -> None:
    with stack.make(options={"gtid_mode": "ON", "enforce_gtid_consistency": "ON"}) as server:
        server.create_backup_users()
        sample.create(server)
        house = House(base, server, keys, programs=stack.all_programs())
        house.backup()
        server.execute("CREATE TABLE shop.later (id INT PRIMARY KEY)", "INSERT INTO shop.later VALUES (1)")
        if not stack.refused():
            Archive(house, server).take()
        house.ok("catalog", "copy")
        before = shown(house)
        for path in [*base.glob("catalog.db*"), base / "spool"]:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        assert "there is no catalog" in house.fails("backups", SERVER).all
        done = house.ok("catalog", "rebuild", "--from", "local")
        assert (done["backups"], done["branches"], done["problems"]) == (1, 0 if stack.refused() else 1, [])
        assert same(shown(house), before)
        assert house.fsck() == []
