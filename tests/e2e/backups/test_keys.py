"""A key is rotated: what was stored stays readable with the old one, what comes is for the new one."""

from __future__ import annotations

import dataclasses
import json
import subprocess

from tests.support.e2e.house import BACKUPD, SERVER, House
from tests.support.keys import copy_public, gpg, make_home, make_key, stop_agent

NEW = "new@example.com"


def _recipients(house: House, backup_id: str) -> list[str]:
    found: list[str] = json.loads(house.manifest(backup_id).read_text())["recipients"]
    return found


def _objects(house: House, backup_id: str) -> set[str]:
    return {item["name"] for item in json.loads(house.manifest(backup_id).read_text())["objects"]}


def test_after_a_rotation_old_backups_need_the_old_key_and_new_ones_the_new_key_alone(house: House) -> None:
    old = house.keys.fingerprint
    house.policy_extra = "witness: {enabled: false}\n"
    house.write()
    first = house.backup()
    both, public, fresh = (make_home(house.base / name) for name in ("both", "public", "fresh"))
    new = make_key(fresh, NEW)
    gpg(both, "--import", stdin=gpg(house.keys.secret_home, "--export-secret-keys", old))
    gpg(both, "--import", stdin=gpg(fresh, "--export-secret-keys", new))
    copy_public(fresh, public, NEW)
    try:
        house.keys = dataclasses.replace(house.keys, secret_home=both, public_home=public, user_id=NEW)
        house.write()
        second, third = house.backup(), house.backup()
        assert _recipients(house, first["id"]) == [old]
        assert _recipients(house, second["id"]) == _recipients(house, third["id"]) == [new]
        assert not _objects(house, first["id"]) & _objects(house, second["id"]), "objects are never shared across keys"
        assert _objects(house, second["id"]) & _objects(house, third["id"])
        house.restore(house.base / "of-old", to=f"backup:{first['id']}")

        listed = {entry["fingerprint"]: entry for entry in house.ok("keys")}
        assert listed[new]["configured"]
        assert (listed[new]["backups"], listed[new]["only_this_key"]) == (2, 2)
        assert not listed[old]["configured"]
        assert (listed[old]["backups"], listed[old]["secret_here"]) == (1, True)

        house.write(restore_home=fresh)
        for command in (
            ("restore", SERVER, "--to", f"backup:{first['id']}", "--datadir", str(house.base / "never")),
            ("backups", "config", first["id"]),
        ):
            refused = house.fails(*command)
            for word in (first["id"], old, "no secret key", "gpg --homedir"):
                assert word in refused.err, refused.err
            assert second["id"] not in refused.err
        assert not (house.base / "never").exists()
        house.restore(house.base / "of-new", to=f"backup:{second['id']}")
        assert old in house.run("keys").out
    finally:
        for home in (both, public, fresh):
            stop_agent(home)


def test_a_challenge_is_answered_on_stdin_and_never_shown(house: House) -> None:
    secret_home = house.keys.secret_home
    house.write(restore_home=make_home(house.base / "empty"))
    asked = house.run("keys", "challenge", "--show")
    assert asked.code == 0, asked.all
    assert "-----BEGIN PGP MESSAGE-----" in asked.out
    (challenge,) = house.ok("keys", "challenge")
    phrase = gpg(secret_home, "-d", challenge["file"])
    answer = ("keys", "answer", challenge["challenge"]["id"])
    for given, code in ((b"wrong", 1), (phrase, 0), (phrase, 1)):
        done = subprocess.run(
            [BACKUPD, *answer], input=given, env=house.environment(), capture_output=True, check=False
        )
        assert done.returncode == code, done
        assert phrase.strip() not in done.stdout + done.stderr
    (entry,) = house.ok("keys")
    assert entry["proved_by"]
    assert entry["open_challenge"] is None
    assert "proved" in house.run("keys").out
    house.fails("keys", "challenge", "--recipient", "nobody@example.com", code=2)
    stop_agent(house.base / "empty")
