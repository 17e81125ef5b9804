from __future__ import annotations

import os

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from backupd.model.errors import DamagedError
from backupd.transfer.records.sealed_format import FrameDecoder, padded, padding


def decode(frame: bytes, limit: int, step: int) -> bytes:
    decoder = FrameDecoder(limit)
    for start in range(0, len(frame), step):
        decoder.feed(frame[start : start + step])
    return decoder.result()


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=400), st.integers(1, 3000), st.integers(1, 20), st.booleans(), st.integers(1, 400))
def test_any_content_cut_anywhere_comes_back(
    seed: bytes,
    repeat: int,
    level: int,
    checksum: bool,
    step: int,
) -> None:
    plain = seed * repeat
    compressor = zstandard.ZstdCompressor(level=level, write_checksum=checksum)
    frame = compressor.compressobj(size=len(plain))
    packed = frame.compress(plain) + frame.flush()
    assert decode(packed, len(plain), step) == plain
    with pytest.raises(DamagedError):
        decode(packed + b"\0", len(plain), step)
    with pytest.raises(DamagedError):
        decode(packed[: -1 - repeat % len(packed)], len(plain), step)
    whole = padding(len(packed)) + packed
    assert decode(whole, len(plain), step) == plain
    for wrong in (whole[: len(whole) - len(packed)], whole[:5], whole + b"\0", whole[:-1], padding(9) + whole):
        with pytest.raises(DamagedError):
            decode(wrong, len(plain), step)
    if plain:
        with pytest.raises(DamagedError):
            decode(packed, len(plain) - 1, step)


def test_a_frame_that_hides_its_size_is_refused() -> None:
    frame = zstandard.ZstdCompressor().compressobj()
    packed = frame.compress(b"content" * 1000) + frame.flush()
    with pytest.raises(DamagedError, match="tell its size"):
        decode(packed, 7000, 100)


@pytest.mark.parametrize("level", [1, 3, 9, 19, 22])
def test_large_frames_of_every_level(level: int) -> None:
    plain = os.urandom(300_000) + bytes(2_000_000) + b"text and more text, " * 50_000
    packed = zstandard.ZstdCompressor(level=level).compress(plain)
    assert decode(packed, len(plain), 100_000) == plain


def test_a_frame_that_wants_too_much_memory_is_refused() -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=31, enable_ldm=True)
    packer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    packed = packer.compress(b"x" * 100) + packer.flush()
    with pytest.raises(DamagedError):
        decode(packed, 1000, 1000)


def test_skippable_frames_elsewhere_and_reserved_blocks_are_refused() -> None:
    frame = zstandard.ZstdCompressor().compress(b"content")
    skippable = b"\x50\x2a\x4d\x18\x04\0\0\0abcd"
    for packed in (skippable, skippable + skippable + frame, frame + skippable):
        with pytest.raises(DamagedError):
            decode(packed, 100, 1000)


def test_padding_leaves_few_lengths_and_costs_little() -> None:
    for size in (*range(3000), 10_000, 1_000_003, 8 * 1024 * 1024 + 17, 2**31 + 5):
        length = size + len(padding(size)) if size < 1_000_000 else padded(size + 8)
        assert length == padded(length), "what is padded has one of the lengths"
        assert size + 8 <= length <= (size + 8) * 1.12 + 1, size
    assert len({padded(size) for size in range(1024 * 1024, 2 * 1024 * 1024)}) == 33
