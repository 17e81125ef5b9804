"""The demultiplexer against a tiny encoder; the real tool's streams are in test_mariabackup."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backupd.engine.physical.capture import FileEvent
from backupd.engine.physical.xbstream import BUFFER_SIZE, Dialect, Doubts, demultiplex
from backupd.model.errors import StreamError
from tests.support.logs.stream import (
    Dribble,
    Folder,
    end,
    header,
    payload,
    remove,
    rename,
    seek,
    sparse,
    whole,
)

_names = st.text(st.characters(exclude_characters="/\0*", exclude_categories=["Cs"]), min_size=1, max_size=12).filter(
    lambda name: name not in (".", "..")
)
_paths = st.builds(lambda folder, name: f"d{folder}/{name}", _names, _names)


@st.composite
def _streams(draw: st.DrawFn) -> tuple[dict[str, bytes], bytes]:
    """Files, and a stream in which their chunks are interleaved at random."""
    files = draw(st.dictionaries(_paths, st.lists(st.binary(min_size=1, max_size=300), max_size=4), max_size=6))
    queues: dict[str, list[bytes]] = {}
    for path, pieces in files.items():
        offset, chunks = 0, []
        for piece in pieces:
            chunks.append(payload(path, piece, offset))
            offset += len(piece)
        queues[path] = [*chunks, end(path)]
    stream = b""
    while queues:
        path = draw(st.sampled_from(sorted(queues)))
        stream += queues[path].pop(0)
        if not queues[path]:
            del queues[path]
    return {path: b"".join(pieces) for path, pieces in files.items()}, stream


@given(_streams(), st.integers(1, 400), st.sampled_from(list(Dialect)))
@settings(max_examples=150, deadline=None)
def test_interleaved_files_come_out_whole(made: tuple[dict[str, bytes], bytes], size: int, dialect: Dialect) -> None:
    files, stream = made
    assert Folder.of(stream, dialect, size=size).files == files


@given(_streams(), st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
def test_a_stream_cut_inside_a_chunk_is_an_error(made: tuple[dict[str, bytes], bytes], data: st.DataObject) -> None:
    _, stream = made
    cut = data.draw(st.integers(0, max(0, len(stream) - 1)))
    if not stream:
        return
    try:
        found = Folder.of(stream[:cut]).files
    except StreamError:
        return
    # Only a cut where every file had ended is not visible in the stream itself: the receipts, which come last, are
    # missing then.
    assert found.items() <= made[0].items()
    assert stream[cut : cut + 8] == b"XBSTCK01"


_SAMPLE = {"shop/a.ibd": b"a" * 40, "shop/b.MYD": b"bb", "ibdata1": bytes(range(60))}
_SAMPLE_STREAM = (
    payload("shop/a.ibd", b"a" * 30)
    + payload("ibdata1", bytes(range(60)))
    + payload("shop/a.ibd", b"a" * 10, 30)
    + end("shop/a.ibd")
    + whole("shop/b.MYD", b"bb")
    + end("ibdata1")
)


def test_every_cut_is_an_error_unless_everything_had_ended() -> None:
    assert Folder.of(_SAMPLE_STREAM).files == _SAMPLE
    for cut in range(1, len(_SAMPLE_STREAM)):
        with pytest.raises(StreamError):
            Folder.of(_SAMPLE_STREAM[:cut])


@pytest.mark.parametrize("dialect", list(Dialect))
def test_every_flipped_bit_is_an_error_or_changes_nothing(dialect: Dialect) -> None:
    harmless = 0
    for position in range(len(_SAMPLE_STREAM)):
        for bit in range(8):
            damaged = bytearray(_SAMPLE_STREAM)
            damaged[position] ^= 1 << bit
            try:
                assert Folder.of(bytes(damaged), dialect).files == _SAMPLE, (position, bit)
                harmless += 1
            except StreamError:
                pass
    # The two flags that are known, in each chunk's header; nothing else may be without effect.
    assert harmless <= 2 * _SAMPLE_STREAM.count(b"XBSTCK01")


def test_payload_larger_than_the_buffer_arrives_in_pieces() -> None:
    data = os.urandom(3 * BUFFER_SIZE + 12345)
    folder = Folder.of(payload("big", data[:-5]) + payload("big", data[-5:], len(data) - 5) + end("big"), size=70000)
    assert folder.files == {"big": data}


def test_an_empty_file_has_only_an_end() -> None:
    assert Folder.of(end("shop/empty.MYD")).files == {"shop/empty.MYD": b""}
    assert Folder.of(b"").files == {}


def test_a_file_that_never_ends_is_an_error() -> None:
    with pytest.raises(StreamError, match=r"ended inside 1 files: shop/a"):
        Folder.of(whole("x", b"1") + payload("shop/a", b"data"))


@pytest.mark.parametrize("again", [payload("a", b"more", 4), whole("a", b"new"), payload("a", b"new")])
def test_data_after_the_end_is_an_error(again: bytes) -> None:
    with pytest.raises(StreamError, match="a comes a second time"):
        Folder.of(whole("a", b"data") + again)


def test_an_innodb_file_that_ends_twice_is_an_error() -> None:
    with pytest.raises(StreamError, match="second time"):
        Folder.of(whole("shop/t.ibd", b"data") + end("shop/t.ibd"))
    with pytest.raises(StreamError, match="second time"):
        Folder.of(whole("shop/t.MYD", b"data") + end("shop/t.MYD"), Dialect.PERCONA)


@pytest.mark.parametrize(
    "stream",
    [
        payload("a", b"1234") + payload("a", b"5", 5) + end("a"),
        payload("a", b"1234") + payload("a", b"5", 3) + end("a"),
        payload("a", b"1234", 1) + end("a"),
    ],
)
def test_payload_that_does_not_continue_the_file_is_an_error(stream: bytes) -> None:
    for dialect in Dialect:
        with pytest.raises(StreamError, match=r"goes on at byte|begins at byte"):
            Folder.of(stream, dialect)


@pytest.mark.parametrize(
    "path",
    [
        b"/etc/passwd",
        b"../x",
        b"a/../../x",
        b"a/..",
        b"..",
        b".",
        b"a//b",
        b"a/",
        b"a/./b",
        b"a\0b",
        b"",
        b"./",
        b"./../x",
        b"x" * 5000,
    ],
)
def test_a_path_that_leads_outside_is_refused(path: bytes) -> None:
    with pytest.raises(StreamError, match="a path"):
        Folder.of(payload(path, b"x") + end(path))
    with pytest.raises(StreamError, match="a path"):
        Folder.of(whole("a", b"x") + header("R", b"a") + len(path).to_bytes(4, "little") + path)


@pytest.mark.parametrize("path", ["a\\b", "sch ema/ta'ble.frm", "ünï/côdé.ibd", "...", "a/..b", "-x", "a\nb"])
def test_unusual_names_are_only_names(path: str) -> None:
    assert list(Folder.of(whole(path, b"x")).files) == [path]


def test_a_name_that_is_not_utf8_comes_back_as_the_same_bytes() -> None:
    (name,) = Folder.of(payload(b"shop/\xff\xfe.frm", b"x") + end(b"shop/\xff\xfe.frm")).files
    assert os.fsencode(name) == b"shop/\xff\xfe.frm"


def test_a_leading_dot_slash_names_the_same_file() -> None:
    assert Folder.of(payload("./a", b"1") + payload("a", b"2", 1) + end("a")).files == {"a": b"12"}


@pytest.mark.parametrize(
    "stream",
    [whole("a", b"1") + whole("a/b", b"2"), whole("a/b", b"1") + whole("a", b"2"), payload("a", b"1") + end("a/b/c")],
)
def test_a_file_that_is_also_a_folder_is_refused(stream: bytes) -> None:
    with pytest.raises(StreamError, match="a file and a folder"):
        Folder.of(stream)


def test_an_unknown_chunk_is_an_error_unless_it_may_be_ignored() -> None:
    unknown = payload("new-thing", b"whatever")
    with pytest.raises(StreamError, match="unknown chunk type 0x51"):
        Folder.of(unknown.replace(b"\0P", b"\0Q", 1))
    ignorable = unknown.replace(b"\0P", b"\1Q", 1)
    assert Folder.of(ignorable + whole("a", b"x")).files == {"a": b"x"}
    with pytest.raises(StreamError, match="checksum"):
        Folder.of(ignorable.replace(b"whatever", b"Whatever"))


def test_unknown_flags_are_an_error() -> None:
    with pytest.raises(StreamError, match="flags 0x04"):
        Folder.of(payload("a", b"x", flags=4) + end("a"))
    with pytest.raises(StreamError, match="flags 0x02"):
        Folder.of(payload("a", b"x", flags=2) + end("a"), Dialect.PERCONA)


def test_garbage_is_an_error() -> None:
    with pytest.raises(StreamError, match="no chunk begins here"):
        Folder.of(b"#!/bin/sh\necho no stream at all\n")


class TestWhatMariadbAdds:
    def test_a_file_that_is_copied_again_replaces_the_first_copy(self) -> None:
        stream = whole("s/t.MYD", b"old data") + payload("s/t.MYD", b"new", flags=2) + end("s/t.MYD")
        assert Folder.of(stream).files == {"s/t.MYD": b"new"}

    def test_a_second_copy_in_two_chunks_and_a_first_one_with_the_flag_are_fine(self) -> None:
        stream = payload("s/t.MYD", b"ab", flags=2) + payload("s/t.MYD", b"cd", 2, flags=2) + end("s/t.MYD")
        assert Folder.of(stream + stream).files == {"s/t.MYD": b"abcd"}

    def test_a_table_emptied_meanwhile_becomes_empty(self) -> None:
        assert Folder.of(whole("s/t.MYD", b"rows") + end("s/t.MYD")).files == {"s/t.MYD": b""}

    def test_removed_files_folders_and_partitions_are_gone(self) -> None:
        stream = b"".join(
            whole(name, b"x")
            for name in ("s/a.MAD", "s/a.MAI", "s/p#P#p0.MYD", "s/p#P#p1.MYD", "s/pp.MYD", "gone/x.frm", "gonetoo/x")
        )
        stream += remove("s/a.MAD") + remove("s/p#P#*") + remove("s/p#P#*") + remove("gone") + remove("s/never.MAD")
        assert set(Folder.of(stream).files) == {"s/a.MAI", "s/pp.MYD", "gonetoo/x"}

    def test_after_a_removal_the_name_is_free_again(self) -> None:
        assert Folder.of(whole("a/b", b"1") + remove("a") + whole("a", b"2")).files == {"a": b"2"}

    @pytest.mark.parametrize(
        "chunk",
        [
            remove("s/t.MYD"),
            remove("s"),
            remove("s/*"),
            rename("s/t.MYD", "s/u.MYD"),
            whole("s/u.MYD", b"") + rename("s/u.MYD", "s/t.MYD"),
        ],
    )
    def test_a_file_that_is_being_written_cannot_be_removed_or_renamed(self, chunk: bytes) -> None:
        with pytest.raises(StreamError, match=r"removal of|cannot be renamed"):
            Folder.of(payload("s/t.MYD", b"x") + chunk + end("s/t.MYD"))

    def test_a_pattern_of_an_unknown_kind_is_an_error(self) -> None:
        with pytest.raises(StreamError, match="pattern"):
            Folder.of(remove("s/*.MYD"))

    def test_a_renamed_file_has_its_new_name_and_replaces_what_had_it(self) -> None:
        stream = whole("s/a.MYD", b"A") + whole("s/b.MYD", b"B") + rename("s/a.MYD", "s/b.MYD")
        assert Folder.of(stream).files == {"s/b.MYD": b"A"}

    def test_a_rename_of_what_was_copied_under_its_new_name_changes_nothing(self) -> None:
        assert Folder.of(whole("s/b.MYD", b"B") + rename("s/a.MYD", "s/b.MYD")).files == {"s/b.MYD": b"B"}

    def test_a_renamed_file_that_is_nowhere_is_an_error(self) -> None:
        with pytest.raises(StreamError, match="left out their data") as caught:
            Folder.of(whole("s/b.frm", b"f") + rename("s/a.MAD", "s/b.MAD"))
        assert "s/b.MAD" in caught.value.detail

    @pytest.mark.parametrize(
        "later", [remove("s/b.MAD"), remove("s"), payload("s/b.MAD", b"B", flags=2) + end("s/b.MAD"), end("s/b.MAD")]
    )
    def test_what_was_renamed_and_then_dropped_or_copied_is_not_missed(self, later: bytes) -> None:
        Folder.of(rename("s/a.MAD", "s/b.MAD") + later)

    def test_a_chain_of_renames_is_followed(self) -> None:
        stream = rename("s/a.MAD", "s/b.MAD") + rename("s/b.MAD", "s/c.MAD")
        with pytest.raises(StreamError, match="left out") as caught:
            Folder.of(stream)
        assert caught.value.detail == "s/c.MAD"
        Folder.of(stream + remove("s/c.MAD"))

    def test_archive_tables_have_no_metadata_file_to_rename(self) -> None:
        Folder.of(whole("s/a.ARZ", b"z") + rename("s/a.ARM", "s/b.ARM") + rename("s/a.ARZ", "s/b.ARZ"))

    def test_a_seek_forward_leaves_a_hole(self) -> None:
        folder = Folder.of(payload("a", b"abc") + seek("a", 10) + payload("a", b"xyz", 10) + end("a"))
        assert folder.files == {"a": b"abc" + bytes(7) + b"xyz"}
        assert folder.holes == {"a": [(3, 7)]}

    def test_a_seek_with_nothing_behind_it_adds_nothing(self) -> None:
        assert Folder.of(payload("a", b"abc") + seek("a", 10) + end("a")).files == {"a": b"abc"}

    def test_a_seek_back_or_in_a_file_that_is_not_open_is_an_error(self) -> None:
        with pytest.raises(StreamError, match="goes back"):
            Folder.of(payload("a", b"abcdef") + seek("a", 1) + payload("a", b"X", 1) + end("a"))
        with pytest.raises(StreamError, match="not open"):
            Folder.of(seek("a", 1))

    def test_percona_streams_have_no_such_chunks(self) -> None:
        for chunk in (remove("a"), rename("a", "b")):
            with pytest.raises(StreamError, match="unknown chunk type"):
                Folder.of(whole("a", b"x") + chunk, Dialect.PERCONA)


class TestSparsePayloadOfPercona:
    pieces = ((0, b"head"), (1000, b"middle"), (5, b""), (20, b"tail"))

    def test_holes_are_told_and_data_lands_at_its_place(self) -> None:
        folder = Folder.of(sparse("s/t.ibd", self.pieces) + end("s/t.ibd"), Dialect.PERCONA, size=7)
        expected = b"head" + bytes(1000) + b"middle" + bytes(25) + b"tail"
        assert folder.files == {"s/t.ibd": expected}
        assert folder.holes == {"s/t.ibd": [(4, 1000), (1010, 5), (1015, 20)]}

    def test_chunks_continue_after_their_last_hole(self) -> None:
        first = sparse("t", [(0, b"ab"), (8, b"")])
        folder = Folder.of(first + sparse("t", [(2, b"cd")], 10) + payload("t", b"e", 14) + end("t"), Dialect.PERCONA)
        assert folder.files == {"t": b"ab" + bytes(10) + b"cd" + b"e"}
        with pytest.raises(StreamError, match="goes on at byte 2 instead of 10"):
            Folder.of(first + sparse("t", [(2, b"cd")], 2) + end("t"), Dialect.PERCONA)

    def test_every_flipped_bit_is_an_error_or_changes_nothing(self) -> None:
        stream = sparse("t", self.pieces) + end("t")
        expected = Folder.of(stream, Dialect.PERCONA).files
        for position in range(len(stream)):
            for bit in range(8):
                damaged = bytearray(stream)
                damaged[position] ^= 1 << bit
                try:
                    assert Folder.of(bytes(damaged), Dialect.PERCONA).files == expected, (position, bit)
                except StreamError:
                    continue

    def test_every_cut_is_an_error(self) -> None:
        stream = sparse("t", self.pieces) + end("t")
        for cut in range(1, len(stream)):
            with pytest.raises(StreamError):
                Folder.of(stream[:cut], Dialect.PERCONA)


@given(st.lists(st.tuples(st.integers(0, 5000), st.binary(max_size=200)), max_size=10))
@settings(max_examples=60, deadline=None)
def test_any_map_of_holes_gives_the_file_it_describes(pieces: list[tuple[int, bytes]]) -> None:
    expected = b"".join(bytes(skip) + data for skip, data in pieces)
    assert Folder.of(sparse("t", pieces) + end("t"), Dialect.PERCONA, size=99).files == {"t": expected}


def test_no_end_is_delivered_for_a_file_with_a_wrong_checksum() -> None:
    stream = bytearray(whole("a", b"data"))
    stream[-len(end("a")) - 1] ^= 1
    events: list[str] = []

    def take() -> Iterator[FileEvent]:
        yield from demultiplex(Dribble(bytes(stream), 1000))

    with pytest.raises(StreamError, match="checksum in a"):
        events.extend(type(event).__name__ for event in take())
    assert events == ["Data"]


def test_what_a_removal_or_rename_may_not_mean_is_left_to_who_knows_the_tables() -> None:
    data = (
        whole("m/a.frm", b"a")
        + whole("m/a.MYD", b"1")
        + whole("m/i.frm", b"i")
        + whole("m/i.new", b"2")
        + whole("m/x.MYD", b"x")
        + whole("m/y.MYD", b"y")
        + remove("m")
        + whole("m/i.new", b"3")
        + whole("m/x.MYD", b"x")
        + whole("m/y.MYD", b"y")
        + rename("m/x.MYD", "m/t.MYD")
        + rename("m/y.MYD", "m/x.MYD")
        + rename("m/t.MYD", "m/y.MYD")
        + rename("m/gone.MYD", "m/here.MYD")
    )
    doubts, folder = Doubts(), Folder()
    for event in demultiplex(Dribble(data, 1 << 20), Dialect.MARIADB, doubts):
        folder.take(event)
    assert folder.files == {"m/a.frm": b"a", "m/i.frm": b"i", "m/i.new": b"3", "m/x.MYD": b"y", "m/y.MYD": b"x"}
    assert doubts.withdrawn == {"m/a.frm", "m/i.frm"}
    assert doubts.lost == {"m/here.MYD"}
    assert doubts.renamed == {f"m/{name}.MYD" for name in ("x", "y", "t", "gone", "here")}
    assert doubts.crossed == {f"m/{name}.MYD" for name in ("x", "y", "t")}
