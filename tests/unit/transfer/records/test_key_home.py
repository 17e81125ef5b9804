"""Keys in a home that nobody can write to: a read-only mount, which root notices as everybody does."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from io import BytesIO
from pathlib import Path

import pytest

from backupd.engine.server.sandbox import is_available
from backupd.model.errors import KeyUnusableError, ToolError
from backupd.transfer.records.encryption import Sealer, Unsealer
from backupd.transfer.records.gpg import usable_home
from backupd.transfer.records.keyring import secret_fingerprints
from backupd.transfer.records.sealed_format import key_ids
from tests.support.keys import make_home, make_key
from tests.support.keys import stop_agent as stop
from tests.support.stores.homes import Homes

_USE = """
import sys
from pathlib import Path
from backupd.process.runtime import runtime_directory
from backupd.transfer.records.gpg import usable_home
from backupd.transfer.records.keyring import secret_fingerprints
from backupd.transfer.records.encryption import Sealer
from backupd.transfer.records.authenticity import Signing, problem_of, sign
from backupd.transfer.records.encryption import Unsealer
home, key = Path(sys.argv[1]), sys.argv[2]
assert secret_fingerprints(home) == {key}
assert Unsealer(home).unseal(Sealer([key], home).seal(b"content"), limit=100) == b"content"
signing = Signing(home, key, (key,))
assert problem_of(signing, b"document", sign(signing, b"document")) == ""
print(usable_home(home))
"""


@pytest.fixture
def locked(monkeypatch: pytest.MonkeyPatch) -> None:
    """No folder counts as writable, as in a read-only mount: root may write to every other one."""
    monkeypatch.setattr("backupd.transfer.records.gpg.os.access", lambda _path, mode: not mode & os.W_OK)


@pytest.mark.skipif(not is_available(), reason="bubblewrap cannot be used on this machine")
def test_a_read_only_home_opens_and_signs_and_nothing_is_left_running(short_tmp: Path) -> None:
    home, run = make_home(short_tmp / "keys"), short_tmp / "run"
    key = make_key(home)
    stop(home)
    run.mkdir()
    before = sorted(path.name for path in home.iterdir())
    done = subprocess.run(
        [
            "bwrap",
            "--ro-bind",
            "/",
            "/",
            "--dev",
            "/dev",
            "--proc",
            "/proc",
            "--bind",
            str(run),
            str(run),
            "--",
            sys.executable,
            "-c",
            _USE,
            str(home),
            key,
        ],
        env={**os.environ, "BACKUPD_RUNTIME": str(run)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    private = done.stdout.strip()
    assert private.startswith(f"{run}/")
    assert sorted(path.name for path in home.iterdir()) == before
    deadline = time.monotonic() + 300
    while _processes_of(private):
        assert time.monotonic() < deadline, _processes_of(private)
        time.sleep(0.05)


def _processes_of(home: str) -> list[bytes]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes()
        except OSError:
            continue
        if home.encode() in line and int(path.parent.name) != os.getpid():
            found.append(line)
    return found


def test_a_private_home_follows_what_is_put_into_the_real_one(locked: None, short_tmp: Path, homes: Homes) -> None:
    home = make_home(short_tmp / "keys")
    assert secret_fingerprints(home) == frozenset(), "gpg has made an empty key ring where it may write"
    private = usable_home(home)
    assert private != home
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    one = make_key(home, "later@example.com")
    stop(home)
    assert secret_fingerprints(home) == {one}
    assert Unsealer(home).unseal(Sealer([one], home).seal(b"content"), limit=100) == b"content"
    assert not [path for path in home.iterdir() if stat.S_ISSOCK(path.stat().st_mode)]
    (home / "trustdb.gpg").unlink(missing_ok=True)
    assert not (usable_home(home) / "trustdb.gpg").is_symlink()


def test_an_agent_that_runs_for_a_read_only_home_is_asked(locked: None, short_tmp: Path) -> None:
    home = make_home(short_tmp / "keys")
    make_key(home)  # which leaves an agent running
    assert usable_home(home) == home
    stop(home)
    assert usable_home(home) != home


def test_no_home_and_a_closed_one_are_told(short_tmp: Path, locked: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyUnusableError, match="does not exist"):
        usable_home(short_tmp / "nowhere")
    home = make_home(short_tmp / "keys")
    monkeypatch.setenv("BACKUPD_RUNTIME", str(short_tmp / "run"))
    private = usable_home(home)
    private.rmdir()
    private.touch()  # something else is in its way
    with pytest.raises(KeyUnusableError, match=r"and not to .* either"):
        usable_home(home)


def test_an_agent_that_cannot_be_started_is_not_called_a_missing_key(
    short_tmp: Path, homes: Homes, monkeypatch: pytest.MonkeyPatch
) -> None:
    sealed = Sealer([homes.one], homes.both).seal(b"content")
    (key,) = key_ids(sealed)
    fake = short_tmp / "gpg"
    fake.write_text(
        f"#!/bin/bash\nwhile [ $1 != --status-fd ]; do shift; done\ncat >/dev/null\n"
        f'printf "[GNUPG:] ENC_TO {key} 18 0\\n[GNUPG:] NO_SECKEY {key}\\n[GNUPG:] DECRYPTION_FAILED\\n" '
        f'>&$2\necho "gpg: can\'t connect to the agent: Read-only file system" >&2\nexit 2\n'
    )
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{short_tmp}:{os.environ['PATH']}")
    with pytest.raises(ToolError, match="could not use the secret key") as caught:
        Unsealer(homes.both).unseal_file(BytesIO(sealed), short_tmp / "plain", limit=1_000_000)
    assert "check the agent" in str(caught.value.hint)
