from __future__ import annotations

import string
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backupd.model.errors import DamagedError, RefusedError
from backupd.model.manifest import Entry
from restore.fetch import sources as names
from restore.fetch.sources import check_collisions, check_entries, colliding, is_case_sensitive
from tests.support.keys import Keys
from tests.support.restores.builder import Builder


def plain(*paths: str) -> list[Entry]:
    return [Entry(path, 0, "", bundle="x") for path in paths]


@pytest.mark.parametrize(
    "path",
    ["../up", "/etc/passwd", "a/../../b", "a//b", "a/./b", "", "a/", "nul\0byte", "..", "n" * 256, "ü" * 128],
)
def test_a_path_that_would_leave_its_folder_is_refused_before_anything_is_written(path: str, keys: Keys) -> None:
    builder = Builder(keys, seal=lambda _keys, content: content)
    header, body = builder.manifest(builder.entries({"good": b"x"}))
    hostile = replace(body, entries=(*body.entries, replace(body.entries[0], path=path)))
    with pytest.raises(DamagedError, match="cannot be restored") as refused:
        check_entries(header, hostile)
    assert repr(path)[:20] in refused.value.damages[0]


def test_names_that_only_look_odd_are_fine(keys: Keys) -> None:
    builder = Builder(keys, seal=lambda _keys, content: content)
    odd = ("back\\slash", "..hidden", "a..b/c", "-dash", " ", "new\nline", "@002e@002e/t.ibd", "n" * 255)
    files = dict.fromkeys(odd, b"x")
    check_entries(*builder.manifest(builder.entries(files)))


def test_entries_that_contradict_the_manifest_are_all_named(keys: Keys) -> None:
    builder = Builder(keys, seal=lambda _keys, content: content, part=1000)
    header, body = builder.manifest(builder.entries({"one": b"1" * 900, "two": b"2" * 2500, "three": b"3" * 900}))
    one, three, two = body.entries
    wrong = replace(
        body,
        entries=(
            replace(one, sha256="0" * 64),
            replace(two, size=2501),
            three,
            three,
            Entry("three/inside", 0, "", bundle="b"),
            replace(three, path="four", parts=(replace(three.parts[0], object="unknown"),)),
        ),
    )
    with pytest.raises(DamagedError) as refused:
        check_entries(header, wrong)
    text = "\n".join(refused.value.damages)
    for says in (
        "'one': its digest",
        "'two': its parts",
        "'three': listed twice",
        "a file and a folder",
        "object unknown",
    ):
        assert says in text


def test_names_that_differ_only_by_case_are_found_also_in_folders_and_unicode() -> None:
    assert colliding(["Case/Twin.ibd", "case/TWIN.ibd", "case/other.ibd", "Ä", "a\u0308"]) == [
        ("Case/Twin.ibd", "case/TWIN.ibd"),
        ("Case", "case"),
        ("Ä", "a\u0308"),
    ]
    assert colliding(["a/t1", "a/t2", "b/t1"]) == []


def test_only_a_folder_that_ignores_case_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_case_sensitive(tmp_path)
    check_collisions(plain("T.ibd", "t.ibd"), tmp_path)
    monkeypatch.setattr(names, "is_case_sensitive", lambda _folder: False)  # needs a kernel with casefolding to be real
    check_collisions(plain("a.ibd", "t.ibd"), tmp_path)
    with pytest.raises(RefusedError, match="ignores case") as refused:
        check_collisions(plain("T.ibd", "t.ibd"), tmp_path)
    assert "'T.ibd' and 't.ibd'" in refused.value.detail
    assert list(tmp_path.iterdir()) == []


@given(st.lists(st.text(alphabet=string.ascii_letters + "/.", min_size=1, max_size=6), max_size=8, unique=True))
def test_no_collision_means_that_all_names_stay_apart_in_lower_case(paths: list[str]) -> None:
    if not colliding(paths):
        assert len({path.casefold() for path in paths}) == len(paths)
