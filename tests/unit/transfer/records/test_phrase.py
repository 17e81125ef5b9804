from __future__ import annotations

import subprocess

import pytest

from backupd.model.errors import KeyUnusableError
from backupd.transfer.records.keyring import digest_of, matches, new_phrase, open_phrase, seal_phrase
from tests.support.stores.homes import Homes, NewHome


def test_a_phrase_is_shown_by_plain_gpg_and_only_to_its_key(homes: Homes) -> None:
    phrase = new_phrase()
    armored = seal_phrase(phrase, homes.one, homes.both)
    assert phrase not in armored
    shown = subprocess.run(
        ["gpg", "--homedir", str(homes.both), "--quiet", "-d"], input=armored.encode(), capture_output=True, check=True
    ).stdout
    assert shown.decode().strip() == phrase
    assert open_phrase(armored, homes.both, None) == phrase
    with pytest.raises(KeyUnusableError, match="no secret key"):
        open_phrase(armored, homes.stranger, None)


def test_nothing_is_sealed_for_a_key_that_is_not_there(homes: Homes, new_home: NewHome) -> None:
    with pytest.raises(KeyUnusableError, match=homes.one):
        seal_phrase("x", homes.one, new_home("none"))


def test_a_phrase_is_recognised_however_it_is_typed_and_no_other_is() -> None:
    phrase = new_phrase()
    assert new_phrase() != phrase
    for typed in (phrase, phrase.upper(), phrase.replace("-", " "), f"  {phrase}\n", phrase.replace("-", "")):
        assert matches(typed, digest_of(phrase))
    for typed in ("", phrase[:-1], new_phrase()):
        assert not matches(typed, digest_of(phrase))
