"""``RECOVER.md`` of a folder on another host, followed with a real sftp."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from backupd.app.recover import recover_text
from tests.support.sshserver import SshServer, ssh_server, why_not

__all__ = ["ssh_server"]
pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "it can run")


def test_copies_are_found_and_fetched_with_sftp_alone(ssh_server: SshServer, tmp_path: Path) -> None:
    folder = tmp_path / "it's a \"vault\""
    (folder / "configuration").mkdir(parents=True)
    for name, content in (("20261121T120000Z-0123456789ab", "newest"), ("20261120T120000Z-0123456789ab", "older")):
        (folder / "configuration" / f"{name}.tar.zst.gpg").write_text(content)
    config = ssh_server.config(folder)
    text = recover_text("vault", config, {}, recipients=["A" * 40])
    settings = text.split("```sh\n")[1].partition("```")[0]
    newest = 'fetch "configuration/$(names configuration/ | sort | tail -n 1)"'
    done = subprocess.run(
        ["sh", "-c", f"{settings}\n{newest}"], capture_output=True, text=True, check=False,
        env={"PATH": "/usr/bin:/bin", "BASE": str(tmp_path / "base"), "GNUPGHOME": "/g", "DATADIR": "/d",
             "SFTP_KEY": str(config.key_file), "KNOWN_HOSTS": str(config.known_hosts)})
    assert (done.returncode, done.stdout) == (0, "newest"), done.stderr
