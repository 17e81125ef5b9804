from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from backupd.model.errors import CancelledError, DestinationError, NotFoundError, RefusedError
from backupd.transfer import leases as lease_module
from backupd.transfer.deletion import mark
from backupd.transfer.leases import Intent, Lease, Owner, Pin, intents, is_alive, pins
from storage import layout
from storage.filesystem import FilesystemDestination
from tests.support.stores.memory import MemoryDestination
from tests.support.stores.stock import START, FakeClock, Stock, backup_id, everything, put

ID = backup_id(1)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.002)


def elsewhere(lease: Lease, **changes: object) -> Lease:
    assert lease.owner is not None
    return dataclasses.replace(lease, owner=dataclasses.replace(lease.owner, **changes))  # type: ignore[arg-type]  # any field


def test_an_intent_is_at_every_destination_while_it_is_held_and_gone_after() -> None:
    places = [MemoryDestination("a"), MemoryDestination("b")]
    with Intent(places, "shop", ID, clock=FakeClock()) as intent:
        for place in places:
            [found] = intents(place)
            assert found == intent.lease
            assert (found.id, found.backups, found.started_at) == (ID, (("shop", ID),), START)
            assert found.owner is not None
            assert found.owner.pid == os.getpid()
            assert is_alive(found, START)
        intent.assert_held()
    assert [intents(place) for place in places] == [[], []]
    assert intent.unremoved == ()


def test_an_intent_on_a_parent_holds_only_while_that_is_whole_and_unmarked_everywhere() -> None:
    clock = FakeClock()
    places = [MemoryDestination("a"), MemoryDestination("b")]
    parent, child = backup_id(7), backup_id(8)
    with (
        pytest.raises(RefusedError, match="was deleted meanwhile") as refused,
        Intent(places, "shop", child, parents=[parent]),
    ):
        pytest.fail("it began without its parent")
    assert refused.value.detail.count("has no manifest") == 2
    for place in places:
        put(place, layout.manifest_key("shop", parent), b"manifest")
    with Intent(places, "shop", child, parents=[parent], clock=clock) as intent:
        assert [found.parents for place in places for found in intents(place)] == [(parent,)] * 2
        intent.assert_held()
        intent.beat()
        assert intents(places[0])[0].parents == (parent,)
        mark(places[1], "shop", parent, START)
        with pytest.raises(RefusedError, match="was deleted meanwhile") as refused:
            intent.assert_held()
    assert refused.value.detail == f"{parent} at destination b is marked deleted"
    assert [intents(place) for place in places] == [[], []]


def test_a_failure_of_the_backup_removes_the_intent_too() -> None:
    place = MemoryDestination("a")
    with pytest.raises(ValueError, match="boom"), Intent([place], "shop", ID):
        raise ValueError("boom")
    assert intents(place) == []


def test_an_intent_is_everywhere_or_nowhere() -> None:
    good, bad = MemoryDestination("good"), MemoryDestination("bad", initialised=False)
    with pytest.raises(DestinationError):
        Intent([good, bad], "shop", ID).__enter__()
    assert everything(good) == set()


def test_the_heartbeat_renews_everywhere_and_keeps_the_start() -> None:
    places, clock = [MemoryDestination("a"), MemoryDestination("b")], FakeClock()
    with Intent(places, "shop", ID, clock=clock, interval=0.001):
        clock.move(minutes=3)
        wait_until(lambda: all(intents(place)[0].heartbeat_at == clock() for place in places))
        assert intents(places[0])[0].started_at == START


def test_the_heartbeat_goes_on_elsewhere_when_one_destination_fails() -> None:
    bad, good, clock = MemoryDestination("bad"), MemoryDestination("good"), FakeClock()
    with Intent([bad, good], "shop", ID, clock=clock) as intent:
        bad._initialised = False
        clock.move(minutes=9)
        intent.beat()
        assert intents(good)[0].heartbeat_at == clock()
        clock.move(minutes=2)
        with pytest.raises(CancelledError, match="bad") as caught:
            intent.assert_held()
        assert "not initialised" in caught.value.detail
    assert intent.unremoved == ("bad: destination bad is not initialised",)


def test_an_intent_that_somebody_removed_is_noticed_and_not_put_again() -> None:
    place = MemoryDestination("a")
    with Intent([place], "shop", ID) as intent:
        place.delete(layout.intent_key(ID))
        intent.beat()
        assert intents(place) == []
        with pytest.raises(CancelledError, match="removed"):
            intent.assert_held()


def test_a_holder_that_slept_gives_up_before_others_count_it_dead() -> None:
    place, clock = MemoryDestination("a"), FakeClock()
    with Intent([place], "shop", ID, clock=clock) as intent:
        clock.move(minutes=10)
        [found] = intents(place)
        assert is_alive(elsewhere(found, host="other"), clock())
        with pytest.raises(CancelledError, match="not renewed"):
            intent.assert_held()
        intent.beat()
        assert intents(place)[0].heartbeat_at == START, "an intent given up must not be renewed"


def test_on_another_machine_only_the_heartbeat_counts() -> None:
    with Intent([MemoryDestination("a")], "shop", ID, clock=FakeClock()) as intent:
        for lease in (
            elsewhere(intent.lease, host="other"),
            elsewhere(intent.lease, boot="other"),
            elsewhere(intent.lease, namespace="pid:[1]"),
        ):
            assert is_alive(lease, START + timedelta(minutes=14, seconds=59))
            assert not is_alive(lease, START + timedelta(minutes=15))


def test_on_this_machine_only_the_process_counts() -> None:
    with subprocess.Popen(["sleep", "600"]) as other:
        ticks = lease_module._start_ticks(other.pid)
        base = Lease(layout.intent_key(ID), (("shop", ID),), Owner.current(), START, START)
        theirs = elsewhere(base, pid=other.pid, ticks=ticks)
        late = START + timedelta(days=3)
        assert is_alive(theirs, late)
        assert not is_alive(elsewhere(theirs, ticks=(ticks or 0) + 1), START), "the process id was used again"
        other.kill()
        wait_until(lambda: not is_alive(theirs, START))  # a zombie is no process any more
        other.wait()
        assert not is_alive(theirs, START)


def test_our_own_lease_lives_only_while_we_hold_it() -> None:
    place = MemoryDestination("a")
    with Intent([place], "shop", ID, clock=FakeClock()) as intent:
        lease = intent.lease
        assert is_alive(lease, START)
    assert not is_alive(lease, START), "a daemon lives long: a lease that could not be removed must not"


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'{"backups": 5}', b"\xff"])
def test_an_intent_that_cannot_be_read_counts_as_somebodys_for_a_while(raw: bytes) -> None:
    clock = FakeClock()
    place = MemoryDestination("a", clock=clock)
    put(place, layout.intent_key(ID), raw)
    [found] = intents(place)
    assert found.owner is None
    assert is_alive(found, clock())
    clock.move(minutes=15)
    assert not is_alive(found, clock())


def test_a_killed_process_leaves_a_dead_intent(tmp_path: Path) -> None:
    place = FilesystemDestination("local", tmp_path / "b")
    place.initialise(START)
    script = (
        "import sys; from pathlib import Path\n"
        "from backupd.transfer.leases import Intent\n"
        "from storage.filesystem import FilesystemDestination\n"
        "with Intent([FilesystemDestination('local', Path(sys.argv[1]))], 'shop', sys.argv[2]):\n"
        "    print('held', flush=True); sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(place.root), ID],
        stdin=subprocess.PIPE,
        text=True,
        stdout=subprocess.PIPE,
        cwd=Path(layout.__file__).parents[1],
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        [found] = intents(place)
        assert is_alive(found, START + timedelta(days=1))
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not is_alive(found, START)
    assert intents(place) == [found]


# Pins


def test_a_pin_names_what_is_read() -> None:
    place = MemoryDestination("a")
    Stock(place).add(1, {"t": b"1"})
    with Pin(place, backup_id(9), [("shop", ID)]):
        [found] = pins(place)
        assert found.backups == (("shop", ID),)
        assert is_alive(found, START)
    assert pins(place) == []


def test_a_marked_or_missing_backup_cannot_be_pinned() -> None:
    place = MemoryDestination("a")
    Stock(place).add(1, {"t": b"1"})
    mark(place, "shop", ID, START)
    with pytest.raises(RefusedError, match="marked deleted"):
        Pin(place, backup_id(9), [("shop", ID)]).__enter__()
    with pytest.raises(NotFoundError):
        Pin(place, backup_id(9), [("shop", backup_id(2))]).__enter__()
    assert pins(place) == []
