"""The way to the bucket fails in every manner while backups are taken, copied, verified, removed and restored.

Whatever a destination does (refuses, hangs, breaks connections, answers that it is busy or full, gives other bytes, has
lost things): what needs it not goes on, nothing false is recorded meanwhile, and once it is well again everything is
caught up. Between us and a real S3 server stands a proxy; the disk of that server tells what is really there.

Listings pass unaltered: nothing in one could show a flipped bit, and TLS does that everywhere but in tests.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from backupd.app.backups import physical as backups
from backupd.app.copies.protection import with_protection
from backupd.app.copies.replication import bring_up_to_date
from backupd.app.restores.catalog_rebuild import rebuild
from backupd.app.retention.deletion import DELETED, sweep_destination
from backupd.app.verify.verification import fsck, verify
from backupd.catalog.session import open_catalog
from backupd.cli.main import main
from backupd.model.errors import BackupdError, DamagedError, DestinationError, ObjectMissingError
from backupd.model.job import silent
from backupd.model.text import new_id
from backupd.process.run_context import RunContext
from backupd.transfer.deletion import marks
from backupd.transfer.leases import Pin, intents, pins
from backupd.transfer.records.segment_documents import Sealed
from backupd.transfer.relay import Relay
from restore.fetch.objects import fetch
from restore.fetch.sources import Sources, load_chain
from storage import layout
from storage.s3 import client as s3client
from storage.s3 import stream as s3upload
from tests.support.dice import SOAK, rounds, thrown
from tests.support.keys import Keys
from tests.support.service.shop import apply
from tests.support.stores.depot import BUCKET, LOCAL, OFFSITE, SERVER, Depot, chain_above, depot, log_of
from tests.support.stores.fault_proxy import Fault, FaultProxy, Kind, changing
from tests.support.stores.s3_server import S3Server

MIB = 1 << 20
LONGEST = 240.0
"""Seconds that one schedule may take, all its faults included: nothing hangs."""


@pytest.fixture(scope="module")
def proxy(s3_server: S3Server) -> Iterator[FaultProxy]:
    with FaultProxy(s3_server.endpoint, thrown("faults of a store")) as between:
        yield between


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory, keys: Keys) -> tuple[Sealed, ...]:
    """Three files of which each came in two pieces first, in the order in which a stream stores them."""
    folder = tmp_path_factory.mktemp("logs")
    return tuple(
        log_of(folder, keys, number, start, end, final=final)
        for number in (1, 2, 3)
        for start, end, final in ((0, 4000, False), (4000, 9000, False), (0, 9500, True))
    )


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes from the database server is made up, and nobody waits for a place that will not come back."""
    monkeypatch.setattr(s3client, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(s3upload, "WHOLE", 5 * MIB)
    monkeypatch.setattr(s3upload, "PART", 5 * MIB)
    monkeypatch.setattr(Relay, "_pause", lambda _self, _seconds: None)


@contextlib.contextmanager
def opened(
    base: Path,
    keys: Keys,
    server: S3Server,
    proxy: FaultProxy,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Depot]:
    proxy.clear()
    base.mkdir(parents=True, exist_ok=True)
    with (
        open_catalog(f"sqlite:///{base}/catalog.db") as catalog,
        depot(base, catalog, keys, server, proxy, base.name) as one,
    ):
        monkeypatch.setattr(backups, "resolve", one.resolve)
        yield one


# -- one schedule


@dataclass
class Schedule:
    """A random story at ``one``, and what came of it: ``tally`` of what went well and of what failed how."""

    one: Depot
    dice: random.Random
    logs: tuple[Sealed, ...]
    tally: Counter[str] = field(default_factory=Counter)
    story: list[str] = field(default_factory=list)
    shipped: dict[str, int] = field(default_factory=lambda: {LOCAL: 0, OFFSITE: 0})
    tables: dict[str, bytes] = field(default_factory=dict)

    def play(self) -> None:
        acts: dict[str, Callable[[], object]] = {
            "backup": self.backup,
            "replicate": self.replicate,
            "binlogs": self.binlogs,
            "verify": lambda: verify(self.one.wiring, SERVER, None, silent),
            "retention": lambda: apply(self.one.wiring, SERVER, self.one.run(), really=True),
            "sweep": lambda: sweep_destination(self.one.wiring, self.one.wiring.destination(OFFSITE)),
            "rebuild": self.rebuild_elsewhere,
            "merge": lambda: rebuild(self.one.wiring, OFFSITE, silent, merge=True),
            "restore": self.restore,
            "fsck": lambda: fsck(self.one.wiring, mend=self.dice.random() < 0.5),
            "damage": self.damage,
        }
        self.do("backup", self.backup)
        order = self.dice.choices(list(acts), weights=[5, 5, 4, 3, 2, 1, 1, 1, 2, 1, 2], k=self.dice.randrange(7, 13))
        for name in order:
            self.one.clock.move(hours=self.dice.choice([1, 10, 25]))
            with changing(self.one.proxy, self.dice):
                self.do(name, acts[name])
            assert not (told := self.one.lies()), f"after {name} the catalog says what is not so: {told}"

    def do(self, name: str, act: Callable[[], object]) -> bool:
        """Whatever fails does it in words: anything else ends the test."""
        begun = time.monotonic()
        said = words = ""
        try:
            act()
        except BackupdError as error:
            said, words = error.message, f"{type(error).__name__}: {error}"
        self.story.append(f"{time.monotonic() - begun:5.1f}s {name}: {words[:600]!r}")
        self.tally[f"{name} failed" if words else name] += 1
        assert bool(said) == bool(words), f"{name} failed without a word"
        assert "Traceback" not in words
        return not words

    def backup(self) -> None:
        both = self.dice.random() < 0.4
        self.one.follow([LOCAL, OFFSITE] if both else [LOCAL], [] if both else [OFFSITE])
        for name in self.dice.sample("abcdef", 2):
            self.tables[f"shop/{name}.ibd"] = self.dice.randbytes(self.dice.choice([0, 300, 20_000, 70_000]))
        if self.dice.random() < 0.1:
            self.tables["shop/large.ibd"] = self.dice.randbytes(11 * MIB)
        parents: tuple[str, ...] = ()
        good = [name for name in self.one.said if self._can_be_built_on(name, both=both)]
        if good and self.dice.random() < 0.5:
            parents = chain_above(self.one.records(), good[-1])
        made = self.one.back_up(dict(self.tables), parents)
        places = [LOCAL, OFFSITE] if both else [LOCAL]
        for place in places:
            wrong = {
                key: problem
                for key, problem in self.one.faults(place, made).items()
                if (place, key) not in self.one.spoiled
            }
            assert not wrong, f"backup {made} was said to be complete at {place}: {wrong}"

    def _can_be_built_on(self, backup_id: str, *, both: bool) -> bool:
        """As the decision about chains has it: unmarked and whole wherever the new one goes."""
        known = {record.id: record for record in self.one.records()}
        if backup_id not in known:
            return False
        chain = [known[name] for name in chain_above(list(known.values()), backup_id)]
        return chain[0].parent is None and all(
            {LOCAL, *([OFFSITE] if both else [])}
            <= {copy.destination for copy in record.copies if copy.state == "complete"}
            for record in chain
        )

    def replicate(self) -> None:
        self.one.follow([LOCAL], [OFFSITE])
        done = bring_up_to_date(self.one.wiring, SERVER, OFFSITE, self.one.run(), pauses=())
        if done.trouble is not None:
            raise done.trouble

    def binlogs(self) -> None:
        """Some more at the required place; now and then the stream serves both. What failed stays in the spool."""
        for place in (LOCAL, OFFSITE) if self.dice.random() < 0.3 else (LOCAL,):
            for sealed in self.logs[self.shipped[place] : self.shipped[place] + 2]:
                self.one.archive(sealed, place)
                self.shipped[place] += 1

    def rebuild_elsewhere(self) -> None:
        with open_catalog(f"sqlite:///{self.one.base}/rebuilt-{new_id(self.one.clock())}.db") as fresh:
            rebuild(self.one.wired(fresh), OFFSITE, silent)
            assert not (told := self.one.lies(fresh)), f"a rebuilt catalog says what is not so: {told}"

    def restore(self) -> None:
        """Wrong bytes are never accepted."""
        at = self.dice.choice([(OFFSITE,), (OFFSITE, LOCAL)])
        known = [record.id for record in self.one.records() if record.id in self.one.said]
        if known:
            read_back(self.one, self.dice.choice(known), at)

    def damage(self) -> None:
        """Something is lost or rots at one place of which the other has a copy."""
        place, other = self.dice.choice([(LOCAL, OFFSITE), (OFFSITE, LOCAL), (OFFSITE, LOCAL)])
        hurt = {_group(key) for where, key in self.one.spoiled if where == other}
        there = [
            key
            for key in sorted(set(self.one.stored_keys(place)) & set(self.one.stored_keys(other)))
            if _group(key) not in hurt
        ]
        for key in self.dice.sample(there, min(len(there), 2)):
            # Without manifest and body nobody can tell a loss from a removal, so the body is never lost.
            if self.dice.random() < 0.5 or key.endswith(layout.BODY):
                self.one.rot(place, key, self.dice)
            else:
                self.one.lose(place, key)

    def all_is_well_again(self) -> None:
        """The faults have ended: what runs by itself every day, until it finds nothing to do. That takes three turns at
        most: a manifest that was put right tells of other things that are wrong, and then children can follow. When so
        much expires that retention asks a person, the person agrees on the third day."""
        one = self.one
        one.proxy.clear()
        one.follow([LOCAL], [OFFSITE], patient=True)
        for sealed in self.logs[self.shipped[LOCAL] :]:
            one.archive(sealed, LOCAL)
        one.clock.move(days=1)
        for turn in ("first", "second", "third"):
            one.clock.move(hours=25)  # what was marked the day before is removed
            expire = partial(apply, one.wiring, SERVER, one.run(), really=turn == "third")
            done = [
                self.do(f"{turn} retention", expire),
                self.do(f"{turn} replicate", self._catch_up),
                self.do(f"{turn} verify", self._verify),
                self.do(f"{turn} fsck", self._mend),
            ]
            if all(done):
                self.do("last replicate", self._catch_up)
                return
        raise AssertionError("what runs by itself does not put everything right")

    def _catch_up(self) -> None:
        done = bring_up_to_date(self.one.wiring, SERVER, OFFSITE, self.one.run(), pauses=())
        if done.trouble is not None:
            raise done.trouble

    def _verify(self) -> None:
        found = verify(self.one.wiring, SERVER, None, silent)
        if found.damages:
            raise DamagedError("damaged", [f"{damage}, mended from {damage.repaired_from}" for damage in found.damages])

    def _mend(self) -> None:
        found = fsck(self.one.wiring, mend=True)
        if found.findings:
            raise DamagedError("fsck found", [str(finding) for finding in found.findings])


def _group(key: str) -> str:
    """What is copied as one thing: an object, all that lies beside a manifest, a binary log."""
    return key if key.startswith(layout.OBJECTS) else key.rpartition("/")[0]


def read_back(one: Depot, backup_id: str, places: tuple[str, ...], *, pinned: bool = True) -> None:
    """Fetch one backup from ``places`` and compare every byte with what was put in."""
    destinations = [one.wiring.destination(place) for place in places]
    folder = one.base / f"restored-{new_id(one.clock())}"
    folder.mkdir()
    with contextlib.ExitStack() as held:
        chain = chain_above(one.records(), backup_id)
        for destination in destinations if pinned else ():
            held.enter_context(
                Pin(destination, new_id(one.clock()), [(SERVER, name) for name in chain], clock=one.clock)
            )
        sources = Sources(destinations, one.wiring.unsealer())
        loaded, _said = load_chain(SERVER, chain, sources)
        fetch(loaded[-1], sources, folder, RunContext(workers=2), durable=False)
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert found == one.said[backup_id], f"{backup_id} came back from {places} with other bytes"


def check_end(one: Depot, story: Schedule) -> None:
    """Everything that has to hold when all is well again."""
    outcome = bring_up_to_date(one.wiring, SERVER, OFFSITE, one.run(), pauses=())
    assert outcome.trouble is None, f"something was not caught up: {outcome.trouble}"
    assert outcome.copied == (), "something was left over"
    assert (outcome.logs.lacking, outcome.logs.segments) == (0, 0), "binary logs were not caught up"
    assert not one.catalog.replications.list(), "something is still called late"

    records = {record.id: record for record in one.records()}
    claimed = {(name, copy.destination): copy for name, record in records.items() for copy in record.copies}
    assert not (told := one.lies(forgive=False)), f"what is called complete is not: {told}"

    for (name, place), copy in claimed.items():
        if copy.state == "damaged":
            assert not one.is_whole(place, name), f"{name} is whole at {place}, and is called damaged"
            other = {LOCAL: OFFSITE, OFFSITE: LOCAL}[place]
            assert not one.is_whole(other, name), f"{name} is damaged at {place} though {other} could mend it"
    for place in (LOCAL, OFFSITE):
        there = {path.parent.name for path in (one.root(place) / "servers" / SERVER).glob("*/manifest.json")}
        assert there == {name for name, at in claimed if at == place}, f"catalog and {place} name other backups"

    for place in (LOCAL, OFFSITE):
        behind = one.behind(place)
        assert (intents(behind), pins(behind)) == ([], []), f"somebody who is gone is still at work at {place}"
        assert not list(behind.list("sweeps/")), f"a removal that ended still holds {place}"
    with contextlib.closing(one.server.client()) as client:
        left = client.list_multipart_uploads(Bucket=BUCKET, Prefix=f"{one.prefix}/").get("Uploads", [])
    assert not left, "an upload in parts was never given up"

    complete = {
        place: sorted(name for (name, at), copy in claimed.items() if at == place and copy.state == "complete")
        for place in (LOCAL, OFFSITE)
    }
    for place, names in complete.items():
        if ours := [name for name in names if name in one.said]:
            read_back(one, ours[-1], (place,))
    for record in with_protection(one.wiring, records.values()):
        places = {copy.destination for copy in record.copies if copy.state == "complete" and copy.verified_at}
        # A copy that the rules let go is offered by nobody, and not read again.
        assert places == {at for (name, at), copy in claimed.items() if name == record.id and copy.state != DELETED}, (
            f"{record.id} was not read again everywhere: {record.copies}"
        )
        assert record.protected == (places == {LOCAL, OFFSITE}), f"{record.id}: protected means two verified copies"
    with open_catalog(f"sqlite:///{one.base}/again.db") as again:
        rebuild(one.wired(again, patient=True), OFFSITE, silent)
        rebuilt = sorted(
            record.id for record in again.backups.list(SERVER) for copy in record.copies if copy.state == "complete"
        )
        assert rebuilt == complete[OFFSITE], "a catalog that is rebuilt tells of other backups"


@pytest.mark.campaign
def test_whatever_the_way_to_the_bucket_does_nothing_false_is_recorded_and_all_is_caught_up(
    tmp_path: Path,
    keys: Keys,
    s3_server: S3Server,
    proxy: FaultProxy,
    logs: tuple[Sealed, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dice = thrown("schedules of faults")
    total: Counter[str] = Counter()
    for number in range(rounds(2)):
        begun = time.monotonic()
        with opened(tmp_path / f"s{number}", keys, s3_server, proxy, monkeypatch) as one:
            told = Schedule(one, random.Random(f"{dice.random()}"), logs)
            try:
                told.play()
                total += Counter({f"fault {kind}": count for kind, count in proxy.done.items()})
                told.all_is_well_again()
                check_end(one, told)
                took = time.monotonic() - begun
                assert took < LONGEST, f"schedule {number} took {took:.0f} s"
            except BaseException:
                print(f"schedule {number}, {time.monotonic() - begun:.0f} s:", *told.story, sep="\n")
                raise
            total += told.tally
    print(dict(sorted(total.items())))


# -- a place that is gone for good


def test_when_the_bucket_is_gone_for_good_the_other_copy_is_restored_and_every_command_says_so_soon(
    tmp_path: Path, keys: Keys, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    del s3_server  # where there is one, there can be another
    with S3Server() as server, FaultProxy(server.endpoint) as way:
        with opened(tmp_path / "gone", keys, server, way, monkeypatch) as one:
            one.follow([LOCAL, OFFSITE], [], patient=True)
            first = one.back_up({"shop/a.ibd": b"a" * 30_000})
            server.kill()
            begun = time.monotonic()
            with pytest.raises(DestinationError, match=OFFSITE):
                one.back_up({"shop/a.ibd": b"b" * 30_000})
            one.follow([LOCAL], [OFFSITE], patient=True)
            second = one.back_up({"shop/a.ibd": b"c" * 30_000})
            for name in (first, second):
                read_back(one, name, (LOCAL,))
                read_back(one, name, (OFFSITE, LOCAL), pinned=False)
            late = bring_up_to_date(one.wiring, SERVER, OFFSITE, one.run(), pauses=())
            assert isinstance(late.problem, DestinationError)
            assert late.waiting.keys() == {second}
            again = bring_up_to_date(one.wiring, SERVER, OFFSITE, one.run(), pauses=())
            assert again.waiting.keys() == {second}, "it is never forgotten"
            assert len(one.catalog.events.list(kind="replication-failing")) == 1
            assert {copy.destination for copy in one.catalog.backups.get(first).copies} == {LOCAL, OFFSITE}
        config = ["--config", str(one.base / "backupd.yaml")]
        for command, names_it in (
            (["backups", SERVER], True),
            (["timeline", SERVER], False),
            (["plan", SERVER, "--to", f"backup:{first}"], True),
            (["check", SERVER], True),
            (["verify", SERVER], True),
            (["fsck"], True),
            (["replicate", SERVER], True),
        ):
            main([*config, *command])
            shown = capsys.readouterr()
            assert "Traceback" not in shown.out + shown.err
            assert not names_it or OFFSITE in shown.out + shown.err, f"{command[0]}: {shown.out}{shown.err}"
        assert time.monotonic() - begun < 3 * LONGEST


@SOAK
def test_a_bucket_that_hangs_for_good_is_given_up_within_the_bound_by_everything_that_asks_it(
    tmp_path: Path, keys: Keys, s3_server: S3Server, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path / "hangs", keys, s3_server, proxy, monkeypatch) as one:
        one.follow([LOCAL, OFFSITE], [])
        name = one.back_up({"shop/a.ibd": b"a" * 30_000})
        proxy.plan(Fault(Kind.HANG))
        bound = 3 * (0.7 + 1.0 + s3client.CONNECT_SECONDS)
        for what, ask in (
            ("replicate", lambda: bring_up_to_date(one.wiring, SERVER, OFFSITE, one.run(), pauses=())),
            ("verify", lambda: verify(one.wiring, SERVER, None, silent)),
            ("fsck", lambda: fsck(one.wiring, mend=False)),
        ):
            begun = time.monotonic()
            ask()
            assert time.monotonic() - begun < bound, what

        assert set(one.wiring.unreachable()) == {OFFSITE}
        read_back(one, name, (LOCAL,))
        assert one.lies() == []


# -- what schedules have found


@pytest.fixture
def one(
    tmp_path: Path,
    keys: Keys,
    s3_server: S3Server,
    proxy: FaultProxy,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> Iterator[Depot]:
    with opened(tmp_path / f"one-{abs(hash(request.node.name))}", keys, s3_server, proxy, monkeypatch) as made:
        yield made


def test_the_objects_of_a_backup_whose_manifest_is_listed_but_not_given_are_not_collected(
    one: Depot, proxy: FaultProxy
) -> None:
    one.follow([LOCAL, OFFSITE], [])
    name = one.back_up({"shop/a.ibd": b"a" * 30_000})
    proxy.plan(Fault(Kind.LOSE, method="GET|HEAD", path=r"^(?!.*list-type).*manifest\.json"))
    held = sweep_destination(one.wiring, one.wiring.destination(OFFSITE))
    assert any(name in text for text in held), held
    assert one.is_whole(OFFSITE, name)


def test_a_refusal_that_breaks_off_in_its_text_is_asked_again(one: Depot, proxy: FaultProxy) -> None:
    offsite = one.wiring.destination(OFFSITE)
    offsite.initialise(one.clock())
    proxy.plan(Fault(Kind.RESET_RESPONSE, method="GET", path="manifest", after=20, times=2))
    with pytest.raises(ObjectMissingError):
        offsite.get(layout.manifest_key(SERVER, "20261121T040000Z-0000000a"))
    assert proxy.done[Kind.RESET_RESPONSE] == 2


def test_a_copy_of_which_nothing_is_left_is_forgotten_and_made_anew(one: Depot) -> None:
    name = one.back_up({"shop/a.ibd": b"a" * 30_000})
    one.back_up({"shop/a.ibd": b"b" * 30_000})
    assert bring_up_to_date(one.wiring, SERVER, OFFSITE, one.run(), pauses=()).ok
    for key in (layout.manifest_key(SERVER, name), layout.body_key(SERVER, name)):
        one.lose(OFFSITE, key)
    assert not verify(one.wiring, SERVER, None, silent).ok
    fsck(one.wiring, mend=True)
    assert [copy.destination for copy in one.catalog.backups.get(name).copies] == [LOCAL]
    assert bring_up_to_date(one.wiring, SERVER, OFFSITE, one.run(), pauses=()).ok
    assert one.is_whole(OFFSITE, name)
    assert one.lies(forgive=False) == []


def test_what_expires_everywhere_and_is_lost_at_one_destination_is_not_missed_for_ever(one: Depot) -> None:
    one.follow([LOCAL], [OFFSITE])
    full = one.back_up({"shop/a.ibd": b"a" * 30_000})
    name = one.back_up({"shop/a.ibd": b"b" * 30_000}, (full,))
    one.back_up({"shop/a.ibd": b"c" * 30_000})
    assert bring_up_to_date(one.wiring, SERVER, OFFSITE, one.run(), pauses=()).ok
    one.lose(OFFSITE, layout.manifest_key(SERVER, name))
    one.clock.move(hours=1)
    one.back_up({"shop/a.ibd": b"d" * 30_000})
    with contextlib.suppress(DamagedError):
        apply(one.wiring, SERVER, one.run())
    one.clock.move(days=5)
    for _turn in range(3):
        with contextlib.suppress(DamagedError):
            apply(one.wiring, SERVER, one.run())
        one.clock.move(days=2)
        bring_up_to_date(one.wiring, SERVER, OFFSITE, one.run(), pauses=())
    assert name not in {record.id for record in one.records()}
    assert bring_up_to_date(one.wiring, SERVER, OFFSITE, one.run(), pauses=()).ok
    assert verify(one.wiring, SERVER, None, silent).ok
    assert not fsck(one.wiring, mend=True).findings
    assert one.lies(forgive=False) == []


def test_a_copy_whose_mark_could_not_be_put_is_offered_by_nobody_and_is_marked_by_the_next_run(
    one: Depot, proxy: FaultProxy
) -> None:
    one.follow([LOCAL, OFFSITE], [])
    for content in b"abcd":
        one.back_up({"shop/a.ibd": bytes([content]) * 30_000})
        one.clock.move(hours=1)
    old = one.records()[-1].id
    proxy.plan(Fault(Kind.ANSWER, method="PUT", path="marks/", status=507, code="InsufficientStorage"))
    with pytest.raises(DestinationError):
        apply(one.wiring, SERVER, one.run(), really=True)
    assert [copy.state for copy in one.catalog.backups.get(old).copies if copy.destination == OFFSITE] == [DELETED]
    assert not marks(one.behind(OFFSITE))
    proxy.plan()
    apply(one.wiring, SERVER, one.run())
    assert bring_up_to_date(one.wiring, SERVER, OFFSITE, one.run(), pauses=()).ok
    assert (SERVER, old) in marks(one.behind(OFFSITE))
    Schedule(one, random.Random(0), ()).all_is_well_again()
    one.clock.move(days=8)
    sweep_destination(one.wiring, one.wiring.destination(OFFSITE))
    assert old not in {record.id for record in one.records()}
    assert one.lies(forgive=False) == []


def test_pieces_that_may_not_be_removed_do_not_keep_later_binary_logs_from_being_copied(
    one: Depot, proxy: FaultProxy, logs: tuple[Sealed, ...]
) -> None:
    one.back_up({"shop/a.ibd": b"a" * 30_000})
    one.archive(logs[0], LOCAL)
    assert bring_up_to_date(one.wiring, SERVER, OFFSITE, one.run(), pauses=()).logs.segments == 1
    for sealed in logs[2::3]:
        one.archive(sealed, LOCAL)
    proxy.plan(Fault(Kind.ANSWER, method="DELETE", path="binlogs/", status=403, code="AccessDenied"))
    done = bring_up_to_date(one.wiring, SERVER, OFFSITE, one.run(), pauses=())
    assert (done.trouble, done.logs.segments, done.logs.lacking) == (None, 3, 0)
    proxy.plan()
    assert bring_up_to_date(one.wiring, SERVER, OFFSITE, one.run(), pauses=()).logs.dropped == 1
