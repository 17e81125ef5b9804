"""Sealing and unsealing from file to file: what may be larger than memory."""

from __future__ import annotations

import io
import os
import subprocess
from pathlib import Path

import pytest

from backupd.model.errors import DamagedError, KeyUnusableError
from backupd.transfer.records.encryption import Sealer, Unsealer
from tests.support.stores.homes import Homes


@pytest.mark.parametrize("size", [0, 1, 300_000, 5_000_001])
def test_a_file_that_was_sealed_opens_again_here_and_with_gpg_and_zstd_alone(
    homes: Homes, tmp_path: Path, size: int
) -> None:
    plain, sealed, opened = (tmp_path / name for name in ("plain", "sealed", "opened"))
    plain.write_bytes(os.urandom(size // 2) + b"x" * (size - size // 2))
    Sealer([homes.one, homes.two], homes.both).seal_file(plain, sealed)
    assert sealed.stat().st_mode & 0o777 == 0o600
    with sealed.open("rb") as stream:
        Unsealer(homes.both).unseal_file(stream, opened, limit=size)
    assert opened.read_bytes() == plain.read_bytes()
    assert opened.stat().st_mode & 0o777 == 0o600
    assert Unsealer(homes.both).unseal(sealed.read_bytes(), limit=size) == plain.read_bytes()
    done = subprocess.run(
        f"gpg --homedir {homes.both} --batch -q -d {sealed} | zstd -q -d", shell=True, check=True, capture_output=True
    )
    assert done.stdout == plain.read_bytes()


def test_what_is_cut_off_or_altered_leaves_no_file(homes: Homes, tmp_path: Path) -> None:
    plain, sealed = tmp_path / "plain", tmp_path / "sealed"
    plain.write_bytes(os.urandom(400_000))
    Sealer([homes.one], homes.both).seal_file(plain, sealed)
    good = sealed.read_bytes()
    flipped = good[:200_000] + bytes([good[200_000] ^ 1]) + good[200_001:]
    for bad in (good[:-1], good[:300_000], flipped, b"", b"nonsense" * 100):
        with pytest.raises(DamagedError):
            Unsealer(homes.both).unseal_file(io.BytesIO(bad), tmp_path / "opened", limit=1_000_000)
        assert not (tmp_path / "opened").exists()


def test_without_the_key_it_says_which_one_is_missing(homes: Homes, tmp_path: Path) -> None:
    plain, sealed = tmp_path / "plain", tmp_path / "sealed"
    plain.write_bytes(b"secret")
    Sealer([homes.one], homes.both).seal_file(plain, sealed)
    with sealed.open("rb") as stream, pytest.raises(KeyUnusableError, match="no secret key"):
        Unsealer(homes.stranger).unseal_file(stream, tmp_path / "opened", limit=100)
    with pytest.raises(KeyUnusableError):
        Sealer([homes.other], homes.both).seal_file(plain, tmp_path / "other")
    assert not (tmp_path / "other").exists()
