"""The same day's work with less and less power over the host, as docs/installing.md has it in "What works where".

A backup, a stream, a proof of the newest moment, a restore of the whole server that is started, and of one table.
"""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import pytest

from backupd.app.context.settings import load_settings
from backupd.engine.server.sandbox import is_available, worker
from tests.e2e.restores.test_every_second import confirmed
from tests.e2e.restores.test_point_in_time import started, sums
from tests.support.dice import SOAK
from tests.support.e2e.house import SERVER, House
from tests.support.e2e.installed import RESTORES, homes, install
from tests.support.e2e.service import ONCE_A_YEAR, catalog_of, serving
from tests.support.keys import Keys, stop_agent
from tests.support.oracle import same
from tests.support.sample import checksum_everything
from tests.support.servers.mariadb import PrivateServer
from tests.support.servers.server import SERVICE_PASSWORD, SERVICE_USER
from tests.support.stores.folders import short_directory

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else"),
    pytest.mark.skipif(not is_available(), reason="bubblewrap cannot be used on this machine"),
]

Powers = Callable[[House, PrivateServer, Sequence[str]], Sequence[str]]
"""The words before each command; given those that stand for the unit."""
OTHER, OTHER_GROUP = "nobody", "nogroup"
"""A service user; the group of the data directory is another one of his."""
OF_A_CONTAINER = (
    "chown",
    "dac_override",
    "fowner",
    "fsetid",
    "kill",
    "setgid",
    "setuid",
    "setpcap",
    "net_bind_service",
    "net_raw",
    "sys_chroot",
    "mknod",
    "audit_write",
    "setfcap",
)
"""What Docker leaves to root by default."""


def as_root(_house: House, _server: PrivateServer, _unit: Sequence[str]) -> Sequence[str]:
    return ()


def as_the_unit(_house: House, _server: PrivateServer, unit: Sequence[str]) -> Sequence[str]:
    return unit


def as_a_user(house: House, server: PrivateServer, _unit: Sequence[str]) -> Sequence[str]:
    subprocess.run(["chmod", "-R", "g+rX", server.datadir], check=True)
    return _as_other(house, server, "--groups", str(server.datadir.stat().st_gid))


def as_a_user_by_acl(house: House, server: PrivateServer, _unit: Sequence[str]) -> Sequence[str]:
    subprocess.run(["chmod", "-R", "g-rwx", server.datadir], check=True)
    for way in ((), ("-d",)):
        subprocess.run(["setfacl", "-R", *way, "-m", f"u:{OTHER}:rX", server.datadir], check=True)
    return _as_other(house, server, "--clear-groups")


def _as_other(house: House, server: PrivateServer, *groups: str) -> Sequence[str]:
    for path in (house.base, server.client_file(SERVICE_USER, SERVICE_PASSWORD)):
        subprocess.run(["chown", "-R", "-h", f"{OTHER}:{OTHER_GROUP}", path], check=True)
    house.config.write_text(house.config.read_text().replace("policy: gold}", f"policy: gold, owner: {OTHER}}}"))
    # The interpreter and the checkout may lie in root's home, which is closed to others: here it is another one.
    home, here = Path(pwd.getpwuid(0).pw_dir), house.base / "home"
    needed = [path for path in (Path(sys.base_prefix), Path(__file__).parents[3]) if path.is_relative_to(home)]
    mounts = []
    for path in needed:
        (here / path.relative_to(home)).mkdir(parents=True, exist_ok=True)
        mounts.append(f"mount --rbind {path} {here / path.relative_to(home)}")
    opened = " && ".join([*mounts, *([f"mount --rbind {here} {home}"] if mounts else []), 'exec "$@"'])
    return (
        "unshare",
        "--mount",
        "--",
        "sh",
        "-c",
        opened,
        "sh",
        "setpriv",
        "--reuid",
        OTHER,
        "--regid",
        OTHER_GROUP,
        *groups,
        "--inh-caps",
        "-all",
        "--bounding-set",
        "-all",
        "--no-new-privs",
    )


def in_a_container(house: House, _server: PrivateServer, _unit: Sequence[str]) -> Sequence[str]:
    """Root with what Docker leaves it, where nobody may make a user namespace: the kernel lets nobody in a chroot."""
    kept = ",".join(f"+{name}" for name in OF_A_CONTAINER)
    here = house.base / "container"
    here.mkdir()
    return (
        "unshare",
        "--mount",
        "--",
        "sh",
        "-c",
        f'mount --rbind / {here} && exec chroot {here} "$@"',
        "sh",
        "setpriv",
        "--bounding-set",
        f"-all,{kept}",
        "--no-new-privs",
    )


@pytest.fixture(scope="module")
def server() -> Iterator[PrivateServer]:
    with PrivateServer() as running:
        running.create_backup_users()
        running.execute(
            f"GRANT ALL ON *.* TO {SERVICE_USER}@localhost",
            "CREATE DATABASE shop",
            "CREATE TABLE shop.orders (id INT AUTO_INCREMENT PRIMARY KEY, v VARCHAR(100))",
            "INSERT INTO shop.orders (v) SELECT REPEAT('x', 80) FROM mysql.seq_1_to_2000",
        )
        yield running


@pytest.mark.parametrize(
    ("powers", "said"),
    [
        # All other tests are those of root.
        pytest.param(as_root, (f"run as {worker() or ''}", "a user namespace confines"), marks=SOAK),
        (as_the_unit, (f"run as {worker() or ''}", "a user namespace confines")),
        (as_a_user, (f"run as {OTHER}, as backupd itself", "a user namespace confines")),
        pytest.param(as_a_user_by_acl, (f"run as {OTHER}, as backupd itself", "a user namespace confines"), marks=SOAK),
        (in_a_container, (f"run as {worker() or ''}", "not sandboxed", "docs/installing.md")),
    ],
)
def test_a_days_work(powers: Powers, said: Sequence[str], server: PrivateServer, keys: Keys) -> None:
    with short_directory() as base:
        house = House(base, server, keys)
        unit = install(house, keys)
        house.catalog = load_settings(house.config).catalog
        (base / "policies" / "gold.yaml").write_text(f"{ONCE_A_YEAR}binlog: {{checkpoint: 1s}}\n")
        house.under = tuple(powers(house, server, unit))
        try:
            _day(house, server, said)
        finally:
            for home in homes(house):
                stop_agent(home)


def _day(house: House, server: PrivateServer, said: Sequence[str]) -> None:
    taken = house.backup()
    checked = house.run("check").all
    assert [text for text in said if text not in checked] == [], checked
    server.execute("INSERT INTO shop.orders (v) SELECT 'later' FROM mysql.seq_1_to_100")
    then = sums(server)
    with serving(house, under=house.under), catalog_of(house) as catalog:
        confirmed(catalog, datetime.now(UTC))
    proof = house.ok("test-restore", SERVER)
    assert (proof["outcome"], proof["tables_compared"], proof["backup"]) == ("proved", 1, taken["id"]), proof
    outcome = house.ok(
        "restore", SERVER, "--to", "latest", "--datadir", str(house.base / RESTORES / "whole"), "--start"
    )
    with started(outcome) as connection:
        same(checksum_everything(connection), then)
    house.ok("restore", SERVER, "--to", "latest", "--tables", "shop.orders", "--as", "back.orders", "--into", SERVER)
    same(sums(server)["`back`.`orders`"], then["`shop`.`orders`"])
    server.execute("DROP DATABASE back")
