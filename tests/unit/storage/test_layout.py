from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backupd.model.binlog import SegmentKey
from backupd.model.errors import DamagedError, UsageError
from backupd.model.manifest import Entry, Part
from storage import layout
from tests.support.dice import thrown

NAME = "ab" * 32 + "-" + "01" * 8
ID = "20261121T042512Z-7f3a9c01"


def test_the_names_are_those_of_the_page() -> None:
    assert layout.object_key(NAME) == f"objects/ab/{NAME}"
    assert layout.manifest_key("shop-db1", ID) == f"servers/shop-db1/{ID}/manifest.json"
    assert layout.body_key("s", ID) == f"servers/s/{ID}/body.jsonl.zst.gpg"
    assert layout.unpack_key("s", ID) == f"servers/s/{ID}/unpack.sh.zst.gpg"
    assert layout.config_key("s", ID) == f"servers/s/{ID}/config.tar.zst.gpg"
    assert layout.runbook_key("s", ID) == f"servers/s/{ID}/RUNBOOK.md"
    assert layout.intent_key(ID) == f"intents/{ID}.json"
    assert layout.pin_key(ID) == f"pins/{ID}.json"
    assert layout.tombstone_key(NAME) == f"tombstones/{NAME}.json"
    assert layout.quarantine_key(NAME) == f"quarantine/{NAME}.json"
    assert layout.mark_key("s", ID) == f"marks/s/{ID}.json"
    assert layout.tree_name("s", ID) == f"servers/s/{ID}"


def test_only_sealed_parts_of_files_and_of_whole_binary_logs_may_be_cold() -> None:
    folder = layout.segment_folder("s", SegmentKey(ID, 7, 0, 100))
    assert layout.cold_kind(layout.object_key(NAME)) == "object"
    assert layout.cold_kind(folder + layout.part_name(3)) == "log"
    assert layout.is_sealed_log(layout.part_name(3, piece=True))
    for key in (
        folder + layout.part_name(3, piece=True),
        folder + layout.index_name(0),
        folder + layout.SEGMENT,
        layout.branch_key("s", ID),
        layout.manifest_key("s", ID),
        layout.body_key("s", ID),
        layout.unpack_key("s", ID),
        layout.config_key("s", ID),
        layout.runbook_key("s", ID),
        layout.mark_key("s", ID),
        layout.REPOSITORY,
        layout.RECOVER,
    ):
        assert layout.cold_kind(key) is None


def test_leases_and_marks_come_and_go_and_what_is_stored_does_not() -> None:
    assert all(
        layout.comes_and_goes(key)
        for key in (
            layout.intent_key(ID),
            layout.pin_key(ID),
            layout.tombstone_key(NAME),
            layout.quarantine_key(NAME),
            layout.mark_key("s", ID),
            layout.keep_key("s", ID),
            layout.hold_key("s"),
        )
    )
    begins, goes_on = (layout.segment_folder("s", SegmentKey(ID, 7, start, 100)) for start in (0, 50))
    assert all(
        layout.comes_and_goes(goes_on + name) and not layout.comes_and_goes(begins + name)
        for name in (
            layout.SEGMENT,
            layout.part_name(0, piece=True),
            layout.index_name(0),
            layout.SEGMENT + layout.SIGNATURE,
        )
    )
    assert not any(
        layout.comes_and_goes(key)
        for key in (
            layout.object_key(NAME),
            layout.manifest_key("s", ID),
            layout.branch_key("s", ID),
            layout.REPOSITORY,
        )
    )


def test_every_key_passes_its_own_check() -> None:
    for key in (
        layout.object_key(NAME),
        layout.manifest_key("s.1", ID),
        layout.tombstone_key(NAME),
        layout.mark_key("s", ID),
        layout.REPOSITORY,
    ):
        layout.check_key(key)


def test_keys_are_read_back() -> None:
    assert layout.backup_of(layout.body_key("s", ID)) == ("s", ID)
    assert layout.backup_of(layout.mark_key("s", ID)) == ("s", ID)
    assert layout.backup_of(layout.tree_name("s", ID)) == ("s", ID)
    assert layout.backup_of(layout.object_key(NAME)) is None
    assert layout.backup_of("servers/s/lost+found/x") is None
    assert layout.name_in(layout.tombstone_key(NAME)) == layout.name_in(layout.object_key(NAME)) == NAME
    assert layout.identity_of(NAME) == "ab" * 32


@pytest.mark.parametrize(
    "name", ["", "../../etc/passwd", NAME.upper(), NAME + "\n", NAME[:-1], "/" + NAME, NAME + "/x"]
)
def test_a_name_from_an_altered_manifest_never_becomes_a_key(name: str) -> None:
    for make in (layout.object_key, layout.tombstone_key, layout.quarantine_key):
        with pytest.raises(DamagedError):
            make(name)


@pytest.mark.parametrize("text", ["", "..", "a/b", "../x", "x" * 100, "a b"])
def test_a_strange_server_or_id_never_becomes_a_key(text: str) -> None:
    with pytest.raises(UsageError):
        layout.manifest_key(text, ID)
    with pytest.raises(UsageError):
        layout.manifest_key("s", text)
    with pytest.raises(UsageError):
        layout.intent_key(text)


def test_tree_paths_look_like_the_files_they_show() -> None:
    assert layout.tree_path("shop/t.ibd") == "shop/t.ibd.zst.gpg"
    assert layout.tree_path("shop/t.ibd", 0) == "shop/t.ibd.parts/00000.zst.gpg"
    assert layout.tree_path("ibdata1", 12345) == "ibdata1.parts/12345.zst.gpg"
    assert layout.tree_path("größe/τ \"'\\.ibd") == "größe/τ \"'\\.ibd.zst.gpg"
    assert layout.bundle_path("shop", NAME).startswith("shop/.bundle-")
    assert layout.bundle_path("", NAME).endswith(".tar.zst.gpg")


@pytest.mark.parametrize("path", ["", "/a", "a/", "a//b", "..", "../a", "a/../b", "./a", "a\0"])
def test_a_hostile_entry_path_has_no_tree_path(path: str) -> None:
    with pytest.raises(ValueError, match="relative path"):
        layout.tree_path(path)


@pytest.mark.parametrize("length", [246, 247, 248, 250, 255])
def test_long_names_are_shortened_and_stay_apart(length: int) -> None:
    names = ["x" * (length - 1) + last for last in "ab"] + ["é" * (length // 2), "é" * (length // 2 - 1) + "e"]
    for part in (None, 0):
        shown = [layout.tree_path(f"s/{name}", part) for name in names]
        assert len(set(shown)) == len(names)
        for path in shown:
            layout.check_tree_path(path)
    assert (layout.tree_path("x" * 247) == "x" * 247 + ".zst.gpg") is True
    assert "~" in layout.tree_path("x" * 248)


def test_names_that_imitate_ours_do_not_collide() -> None:
    tricky = [
        "t",
        "t.parts",
        "t.zst.gpg",
        "t.parts/00000",
        "t.parts/00000.zst.gpg",
        "t.zst.gpg/x",
        "t/x",
        "T",
        ".bundle-1.tar",
        layout.bundle_path("", NAME).removesuffix(".zst.gpg"),
        "t~1",
        "t~",
        "~",
        "a.parts.zst.gpg",
    ]
    tricky += [layout.tree_path(name).removesuffix(".zst.gpg") for name in ("t~", "~", "x" * 250)]
    shown = [(name, part) for name, part in itertools.product(dict.fromkeys(tricky), (None, 0, 1))]
    paths = [layout.tree_path(name, part) for name, part in shown] + [layout.bundle_path("", NAME)]
    assert len(set(paths)) == len(paths)
    singles = {layout.tree_path(name) for name in dict.fromkeys(tricky)}
    folders = {path.rpartition("/")[0] for path in paths if "/" in path}
    above = {"/".join(folder.split("/")[:depth]) for folder in folders for depth in range(1, 9)}
    assert not singles & above, "one name would be a file and a folder"


component = st.text(
    st.sampled_from("ab~.x") | st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1, max_size=12
).filter(lambda name: name not in {".", ".."})
suffixed = st.tuples(component, st.sampled_from(["", ".parts", ".zst.gpg", ".parts/00000", "~"])).map("".join)
paths = st.lists(suffixed, min_size=1, max_size=3).map("/".join)


@settings(max_examples=500, deadline=None)
@given(paths, paths, st.none() | st.integers(0, 3), st.none() | st.integers(0, 3))
def test_no_two_parts_share_a_tree_path(one: str, other: str, first: int | None, second: int | None) -> None:
    if (one, first) != (other, second):
        assert layout.tree_path(one, first) != layout.tree_path(other, second)


def test_the_links_of_a_body_are_parts_and_bundles() -> None:
    parts = tuple(Part(f"{index:064x}-" + "0" * 16, 1, "0" * 64) for index in range(3))
    entries = [
        Entry("shop/a.ibd", 1, "0", parts=parts[:1]),
        Entry("shop/b.ibd", 2, "0", parts=parts[1:]),
        Entry("shop/db.opt", 1, "0", bundle=NAME),
        Entry("shop/x.frm", 1, "0", bundle=NAME),
    ]
    assert dict(layout.tree_links(entries)) == {
        "shop/a.ibd.zst.gpg": parts[0].object,
        "shop/b.ibd.parts/00000.zst.gpg": parts[1].object,
        "shop/b.ibd.parts/00001.zst.gpg": parts[2].object,
        layout.bundle_path("shop", NAME): NAME,
    }
    far = [Entry("shop/db.opt", 1, "0", bundle=NAME), Entry("zoo/db.opt", 1, "0", bundle=NAME)]
    assert dict(layout.tree_links(far)) == {layout.bundle_path("", NAME): NAME}


def test_a_hundred_thousand_paths_stay_apart() -> None:
    dice = thrown("tree paths")
    names = {
        "".join(dice.choices("ab~.", k=dice.randint(1, 9))) + dice.choice(["", ".parts", ".zst.gpg"])
        for _ in range(100_000)
    } - {".", ".."}
    assert len({layout.tree_path(name) for name in names}) == len(names)


@pytest.mark.parametrize("server", ["*", "shop", "all", "every.json", "server.json"])
def test_the_key_of_a_hold_names_its_server_and_is_never_taken_for_that_of_a_kept_backup(server: str) -> None:
    key = layout.hold_key(server)
    layout.check_key(key)
    assert layout.held_server(key) == server
    assert layout.backup_of(key) is None
    if server != "*":
        kept = layout.keep_key(server, "20261121T040000Z-0000000a")
        layout.check_key(kept)
        assert layout.held_server(kept) is None
        assert layout.backup_of(kept) == (server, "20261121T040000Z-0000000a")
