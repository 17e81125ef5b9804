"""Messages out of bytes, however they are cut on their way."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backupd.engine.receiver import packets as module
from backupd.engine.receiver.packets import FULL, Packets


def sent(message: bytes, *, full: int = FULL) -> bytes:
    """As a server sends it."""
    packets, at, number = b"", 0, 0
    while True:
        payload = message[at : at + full]
        packets += len(payload).to_bytes(3, "little") + bytes([number % 256]) + payload
        at, number = at + len(payload), number + 1
        if len(payload) < full:
            return packets


def read(packets: Packets, chunks: Iterable[bytes]) -> list[bytes]:
    messages: list[bytes] = []
    whole = b""
    for chunk in chunks:
        left = memoryview(chunk)
        while left:
            space = packets.space()
            size = min(len(space), len(left))
            space[:size] = left[:size]
            packets.came(size)
            left = left[size:]
            for first, last, data in packets.pieces():
                whole = bytes(data) if first else whole + bytes(data)
                if last:
                    messages.append(whole)
    return messages


def cut(data: bytes, places: list[int]) -> list[bytes]:
    ends = sorted({place % (len(data) + 1) for place in places} | {len(data)})
    return [data[start:end] for start, end in zip([0, *ends], ends, strict=False)]


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.binary(max_size=700), max_size=8),
    st.lists(st.integers(0, 10_000), max_size=20),
    st.integers(module.FIRST_PIECE + 4, 300),
)
def test_messages_are_the_same_wherever_the_bytes_are_cut(messages: list[bytes], places: list[int], size: int) -> None:
    data = b"".join(map(sent, messages))
    assert read(Packets(size), cut(data, places)) == messages


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.binary(max_size=5_000), st.integers(module.FIRST_PIECE + 4, 300), st.lists(st.integers(0, 5_000), max_size=9))
def test_whatever_comes_is_cut_without_an_error_and_space_is_left(data: bytes, size: int, places: list[int]) -> None:
    packets = Packets(size)
    read(packets, cut(data, places))
    assert len(packets.space()) > 0


def test_a_message_goes_on_in_the_next_packet_and_an_empty_one_ends_it() -> None:
    messages = [b"a" * (FULL - 1), b"b" * FULL, b"c" * (FULL + 1), b"d" * 2 * FULL, b"", b"e"]
    data = b"".join(map(sent, messages))
    packets = Packets()
    assert read(packets, [data[at : at + 99_991] for at in range(0, len(data), 99_991)]) == messages
    assert len(packets.space()) == module.BUFFER
