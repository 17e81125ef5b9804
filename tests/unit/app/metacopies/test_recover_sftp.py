"""``RECOVER.md`` of a folder on another host, followed with a real sftp."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from backupd.app.metacopies.recover_document import recover_text
from tests.support.stores.ssh_server import SshServer, ssh_server, why_not

__all__ = ["ssh_server"]
pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "it can run")


def test_copies_and_the_backup_for_a_moment_are_found_and_fetched_with_sftp_alone(
    ssh_server: SshServer, tmp_path: Path
) -> None:
    folder = tmp_path / 'it\'s a "vault"'
    (folder / "configuration").mkdir(parents=True)
    for name, content in (("20261121T120000Z-0123456789ab", "newest"), ("20261120T120000Z-0123456789ab", "older")):
        (folder / "configuration" / f"{name}.tar.zst.gpg").write_text(content)
    config = ssh_server.config(folder)
    text = recover_text("vault", config, {}, recipients=["A" * 40])
    blocks = [part.partition("\n```\n")[0] for part in text.split("\n```sh\n")[1:]]
    settings = blocks[0]
    newest = 'fetch "configuration/$(names configuration/ | sort | tail -n 1)"'
    env = {
        "PATH": "/usr/bin:/bin",
        "BASE": str(tmp_path / "base"),
        "GNUPGHOME": "/g",
        "DATADIR": "/d",
        "SERVER": "shop",
        "SFTP_KEY": str(config.key_file),
        "KNOWN_HOSTS": str(config.known_hosts),
    }
    done = subprocess.run(["sh", "-c", f"{settings}\n{newest}"], capture_output=True, text=True, check=False, env=env)
    assert (done.returncode, done.stdout) == (0, "newest"), done.stderr

    for day, kind in (("19", "full"), ("20", "incremental"), ("21", "logical"), ("22", "full")):
        name = f"202611{day}T020000Z-7f3a9c01"
        (folder / "servers/shop" / name).mkdir(parents=True)
        (folder / "servers/shop" / name / "manifest.json").write_text(
            f'{{"backup":"{name}","finished_at":"2026-11-{day}T02:00:01.500000Z","kind":"{kind}","server":"shop"}}\n'
        )
        (folder / "servers/shop" / name / "RUNBOOK.md").write_text(
            "### From other (SFTP)\n```shell\nexit 1\n```\n### From vault (SFTP)\n```shell\nset -eu\n```\n"
            '```shell\nsftp -q -b - -i "$SSH_KEY" $SSH_OPTIONS -P '
            f'{config.port} {config.user}@{config.host} < /dev/null\nmkdir "$REPOSITORY"\n```\n## 1. Settings\n'
            f'```sh\ncd "$REPOSITORY"\n```\n```sh\necho {name} to "$TO"\n```\n'
        )
    for to, taken in (
        ("2026-11-22T02:00:01Z", "20"),
        ("2026-11-22T02:00:01.6Z", "22"),
        ("2026-11-20T01:00:00Z", "19"),
        ("latest", "22"),
    ):
        done = subprocess.run(
            ["sh", "-c", f"{settings}\n{blocks[-1]}"],
            capture_output=True,
            text=True,
            check=False,
            env=env | {"TO": to, "REPOSITORY": str(tmp_path / f"fetched {to}")},
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == f"202611{taken}T020000Z-7f3a9c01 to {to}"
    done = subprocess.run(
        ["sh", "-c", f"{settings}\n{blocks[-1]}"],
        capture_output=True,
        text=True,
        check=False,
        env=env | {"TO": "2026-11-19T02:00:01Z"},
    )
    assert done.returncode == 1
    assert "no physical backup of shop had ended by 2026-11-19T02:00:01Z" in done.stderr
