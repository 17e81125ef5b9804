"""A bare host: nothing is left of the old one but the destination and the private key."""

from __future__ import annotations

import hashlib
import shutil
import stat
import subprocess

from tests.support.e2e.house import House
from tests.support.servers.mariadb import SERVICE_PASSWORD, SERVICE_USER, connect
from tests.support.stores.folders import give_to_database

_HASH = hashlib.sha1(hashlib.sha1(b"Emerald-9").digest()).hexdigest().upper().encode()


def test_a_server_and_its_accounts_come_back_on_a_bare_host_with_the_recovered_option_file(own_house: House) -> None:
    house, server = own_house, own_house.server
    scripts = house.base / "scripts"
    scripts.mkdir()
    (scripts / "rotate").write_text("#!/bin/sh\necho rotated\n")
    included = house.base / "conf.d"
    included.mkdir()
    (included / "extra.cnf").write_text("[mysqld]\nmax_connections=43\n")
    server.execute(
        "CREATE USER `o'brien`@localhost IDENTIFIED BY 'Emerald-9'",
        "CREATE ROLE reader",
        "GRANT SELECT ON shop.* TO reader",
        "GRANT reader TO `o'brien`@localhost",
        "SET DEFAULT ROLE reader FOR `o'brien`@localhost",
    )
    assert _HASH.decode() in server.scalar("SHOW CREATE USER `o'brien`@localhost")
    server.option_path.write_text(server.option_path.read_text() + f"!includedir {included}\n")
    house.policy_extra = f"config_files: [{scripts}, {house.base}/gone]\n"
    house.write()
    record = house.backup()
    assert [text for text in record["warnings"] if "gone is not kept" in text]

    for path in (*house.base.glob("catalog.db*"), *(house.base / "spool").rglob("*"), *house.repository.rglob("*")):
        if path.is_file():
            assert _HASH not in path.read_bytes().upper(), path

    sealed = house.repository / "servers/shop-db1" / record["id"] / "config.tar.zst.gpg"
    assert b"mysqld" not in sealed.read_bytes()
    listed = house.ok("backups", "config", record["id"])
    assert f"host/files{scripts}/rotate" in {member["name"] for member in listed["members"]}
    text = house.run("backups", "config", record["id"])
    assert text.code == 0
    assert "server/accounts.sql" in text.out

    server.kill()
    for lost in (server.base, scripts, included):
        shutil.rmtree(lost)
    out = house.base / "recovered"
    taken = house.ok("backups", "config", record["id"], "--out", str(out))
    assert len(taken["written"]) >= 9
    for path in out.rglob("*"):
        assert stat.S_IMODE(path.lstat().st_mode) == (0o700 if path.is_dir() else 0o600)
    assert (out / f"host/files{scripts}/rotate").read_text() == "#!/bin/sh\necho rotated\n"
    house.fails("backups", "config", record["id"], "--out", str(out))

    # The plain way of the runbook gives the very same.
    folder = f"servers/shop-db1/{record['id']}"
    assert f"$REPOSITORY/{folder}/config.tar.zst.gpg" in house.run("runbook", record["id"]).out
    plain = house.base / "plain"
    plain.mkdir()
    subprocess.run(
        f"gpg --homedir {house.keys.secret_home} --quiet -d {sealed} | zstd -q -d | tar -x -C {plain}",
        shell=True,
        check=True,
    )
    assert (plain / "server/accounts.sql").read_bytes() == (out / "server/accounts.sql").read_bytes()

    # The new host has the old one's paths: the option file is put back as it was, and so is what it includes.
    server.base.mkdir(mode=0o755)
    give_to_database(server.base)
    for lost in (server.option_path, included, scripts):
        kept = out / f"host/files{lost}"
        (shutil.copytree if kept.is_dir() else shutil.copy)(kept, lost)
    included.chmod(0o755)
    (included / "extra.cnf").chmod(0o644)
    server.option_path.chmod(0o644)
    server.error_log.touch()
    give_to_database(server.error_log)
    client = server.client_file(SERVICE_USER, SERVICE_PASSWORD)
    assert client.is_file()
    house.restore(server.datadir)
    server._launch(60)
    assert server.scalar("SELECT @@max_connections") == 43
    with connect(server.socket, user="o'brien", password="Emerald-9") as mine, mine.cursor() as cursor:
        cursor.execute("SELECT COUNT(*) FROM shop.customers")
        assert cursor.fetchone() == (1000,)
