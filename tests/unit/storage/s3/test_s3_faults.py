"""A bucket whose server, or the way to it, fails in every manner that can be played between us and a real one."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest
from botocore.exceptions import ClientError

from backupd.model.errors import DamagedError, DestinationError, DestinationFullError, LockedError, ObjectMissingError
from storage import layout, objects
from storage.s3 import client as s3client
from storage.s3.client import Explainer
from storage.s3.destination import S3Destination
from tests.contract.destination import get, keys, put
from tests.support.dice import rounds, thrown
from tests.support.stores.buckets import OBJECT, config, opened
from tests.support.stores.fault_proxy import Fault, FaultProxy, Kind, schedule
from tests.support.stores.s3_server import S3Server

MARK = layout.mark_key("shop", "20261121T042512Z-7f3a9c01")
MIB = 1 << 20


@pytest.fixture(scope="module")
def proxy(s3_server: S3Server) -> Iterator[FaultProxy]:
    with FaultProxy(s3_server.endpoint, thrown("faults of S3")) as between:
        yield between


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3client, "FIRST_PAUSE", 0.02)


@pytest.fixture
def destination(s3_server: S3Server, proxy: FaultProxy) -> Iterator[S3Destination]:
    proxy.clear()
    with opened(config(s3_server, endpoint_url=proxy.endpoint), begin_seconds=60.0) as made:
        proxy.clear()
        yield made
        proxy.clear()


def test_a_place_that_refuses_says_so_and_is_used_again_when_it_is_back(
    destination: S3Destination, proxy: FaultProxy
) -> None:
    put(destination, MARK, b"before")
    proxy.down()
    try:
        for ask in (lambda: put(destination, MARK, b"x"), lambda: get(destination, MARK), destination.is_initialised):
            with pytest.raises(DestinationError, match="offsite") as caught:
                ask()
            assert proxy.endpoint in caught.value.hint
            assert caught.value.retryable
    finally:
        proxy.up()
    assert get(destination, MARK) == b"before"


def test_a_place_that_hangs_is_given_up_and_left_as_it_was(s3_server: S3Server, proxy: FaultProxy) -> None:
    proxy.clear()
    where = config(s3_server, endpoint_url=proxy.endpoint)
    with (
        opened(where) as destination,
        opened(where, initialise=False, read_seconds=0.7, begin_seconds=1.0) as impatient,
    ):
        put(destination, MARK, b"before")
        proxy.clear()
        proxy.plan(Fault(Kind.HANG))
        for ask in (lambda: put(impatient, MARK, b"x"), lambda: get(impatient, MARK), lambda: keys(impatient)):
            with pytest.raises(DestinationError):
                ask()
        assert 3 <= proxy.done[Kind.HANG] <= 6, "none is begun later than a second after the first"
        proxy.plan()
        assert get(destination, MARK) == b"before"


def test_one_hanging_answer_does_not_fail_a_request(s3_server: S3Server, proxy: FaultProxy) -> None:
    proxy.clear()
    with opened(config(s3_server, endpoint_url=proxy.endpoint), read_seconds=1.0, begin_seconds=20.0) as destination:
        proxy.plan(Fault(Kind.HANG, method="PUT", times=1))
        put(destination, OBJECT, b"x")
        assert proxy.done[Kind.HANG] == 1
        assert get(destination, OBJECT) == b"x"


@pytest.mark.parametrize(
    "fault",
    [
        Fault(Kind.ANSWER, times=2),
        Fault(Kind.ANSWER, status=500, code="InternalError", times=2),
        Fault(Kind.ANSWER, status=429, code="TooManyRequests", times=1),
        Fault(Kind.REFUSE, times=2),
    ],
    ids=lambda fault: f"{fault.kind}-{fault.status}",
)
def test_a_place_that_is_busy_for_a_moment_is_asked_again(
    destination: S3Destination, proxy: FaultProxy, fault: Fault
) -> None:
    proxy.plan(fault)
    put(destination, OBJECT, b"content")
    assert proxy.done[fault.kind] == fault.times
    assert get(destination, OBJECT) == b"content"


def test_a_place_that_stays_busy_fails_the_request_and_nothing_is_there(
    destination: S3Destination, proxy: FaultProxy
) -> None:
    proxy.plan(Fault(Kind.ANSWER, method="PUT"))
    with pytest.raises(DestinationError, match="writing") as caught:
        put(destination, OBJECT, b"x")
    assert "SlowDown" in caught.value.detail
    assert proxy.done[Kind.ANSWER] > 2
    assert keys(destination) == []


def test_a_full_place_says_so_at_once(destination: S3Destination, proxy: FaultProxy) -> None:
    for status, code in ((507, "InsufficientStorage"), (403, "QuotaExceeded"), (507, "XMinioStorageFull")):
        proxy.plan(Fault(Kind.ANSWER, method="PUT", status=status, code=code))
        with pytest.raises(DestinationFullError) as caught:
            put(destination, OBJECT, b"x")
        assert caught.value.destination == "offsite"
        assert proxy.done[Kind.ANSWER] == 1
        proxy.clear()
    assert keys(destination) == []


@pytest.mark.campaign
def test_uploads_that_break_anywhere_are_whole_or_not_there(destination: S3Destination, proxy: FaultProxy) -> None:
    dice = thrown("broken uploads")
    for number in range(rounds(12)):
        content = dice.randbytes(dice.choice([1, 1000, 300_000, 2 * MIB]))
        key = f"{layout.OBJECTS}ab/{number:064d}-{'01' * 8}"
        proxy.plan(*schedule(dice, chance=0.5, size=len(content), method="PUT|HEAD"))
        try:
            put(destination, key, content)
        except DestinationError:
            proxy.plan()
            try:
                assert get(destination, key) == content
            except ObjectMissingError:
                put(destination, key, content)
        proxy.plan()
        assert get(destination, key) == content
        assert objects.problem(destination, key, objects.named("ab" * 32, content)) == ""


@pytest.mark.campaign
def test_downloads_that_break_anywhere_go_on_where_they_broke(destination: S3Destination, proxy: FaultProxy) -> None:
    dice = thrown("broken downloads")
    content = dice.randbytes(3 * MIB)
    put(destination, OBJECT, content)
    kinds = (Kind.RESET_RESPONSE, Kind.TRUNCATE, Kind.ANSWER, Kind.REFUSE)
    for _ in range(rounds(12)):
        offset = dice.choice([0, dice.randrange(len(content))])
        length = dice.choice([None, dice.randrange(1, len(content))])
        proxy.plan(
            *(
                Fault(kind, method="GET", path=OBJECT, after=dice.randrange(len(content)), chance=0.3, times=2)
                for kind in kinds
            )
        )
        end = None if length is None else offset + length
        assert get(destination, OBJECT, offset=offset, length=length) == content[offset:end]


def test_an_object_that_is_replaced_while_its_reader_was_cut_off_is_an_error(
    destination: S3Destination, proxy: FaultProxy
) -> None:
    put(destination, MARK, b"a" * MIB)
    proxy.plan(Fault(Kind.TRUNCATE, method="GET", after=100_000, times=1))
    with destination.get(MARK) as stream:
        put(destination, MARK, b"b" * MIB)
        with pytest.raises(DestinationError, match="replaced while it was read"):
            stream.read()


def test_a_stream_that_never_comes_to_its_end_is_an_error_and_no_short_file(
    destination: S3Destination, proxy: FaultProxy
) -> None:
    put(destination, MARK, b"a" * 1000)
    proxy.plan(Fault(Kind.TRUNCATE, method="GET", after=0))
    with destination.get(MARK) as stream, pytest.raises(DestinationError, match="reading"):
        stream.read()


def test_bytes_that_change_on_the_way_there_are_noticed_and_sent_again(
    destination: S3Destination, proxy: FaultProxy
) -> None:
    proxy.plan(Fault(Kind.FLIP_REQUEST, method="PUT", after=500, times=1))
    put(destination, OBJECT, b"c" * 1000)
    assert proxy.done[Kind.FLIP_REQUEST] == 1
    assert get(destination, OBJECT) == b"c" * 1000


def test_bytes_that_change_on_the_way_here_are_noticed_by_whoever_verifies(
    destination: S3Destination, proxy: FaultProxy
) -> None:
    item = objects.named("ab" * 32, b"sealed" * 100)
    objects.store(destination, item, b"sealed" * 100)
    proxy.plan(Fault(Kind.FLIP_RESPONSE, method="GET", path=item.name, after=77, times=1))
    with pytest.raises(DamagedError):
        objects.fetch(destination, item)
    assert objects.fetch(destination, item) == b"sealed" * 100


def test_an_answer_that_is_lost_after_the_server_did_it_is_no_failure(
    destination: S3Destination, proxy: FaultProxy
) -> None:
    for key in (OBJECT, MARK):
        proxy.plan(Fault(Kind.RESET_RESPONSE, method="PUT", times=1))
        put(destination, key, b"content")
        assert get(destination, key) == b"content"
    assert proxy.done[Kind.RESET_RESPONSE] == 2


def test_an_object_that_was_taken_and_is_gone_is_an_error(destination: S3Destination, proxy: FaultProxy) -> None:
    proxy.plan(Fault(Kind.LOSE, method="PUT"))
    with pytest.raises(DestinationError, match="but no longer has it") as caught:
        put(destination, OBJECT, b"x")
    assert not isinstance(caught.value, ObjectMissingError)


def test_a_server_that_does_not_know_conditions_is_asked_without_them(
    destination: S3Destination, proxy: FaultProxy
) -> None:
    proxy.plan(Fault(Kind.ANSWER, method="PUT", status=501, code="NotImplemented", times=1))
    put(destination, OBJECT, b"x")
    proxy.clear()
    put(destination, OBJECT.replace("ab", "cd"), b"y")
    assert proxy.requests["PUT"] == 1
    assert keys(destination) == [OBJECT, OBJECT.replace("ab", "cd")]


def test_a_clock_that_is_wrong_is_told(destination: S3Destination, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(**_how: object) -> datetime:
        return datetime.now(UTC).replace(tzinfo=None) - timedelta(days=365)

    monkeypatch.setattr("botocore.auth.get_current_datetime", late)
    with pytest.raises(DestinationError) as caught:
        put(destination, OBJECT, b"x")
    assert "clock" in caught.value.hint


def test_missing_rights_are_named(destination: S3Destination, proxy: FaultProxy) -> None:
    proxy.plan(Fault(Kind.ANSWER, status=403, code="AccessDenied"))
    with pytest.raises(DestinationError) as caught:
        put(destination, OBJECT, b"x")
    assert "s3:PutObject" in caught.value.hint
    assert "s3:DeleteObject" in caught.value.hint


def test_what_may_not_be_deleted_is_locked_and_stays(destination: S3Destination, proxy: FaultProxy) -> None:
    put(destination, OBJECT, b"x")
    proxy.plan(Fault(Kind.ANSWER, method="DELETE", status=403, code="AccessDenied"))
    with pytest.raises(LockedError, match=OBJECT):
        destination.delete(OBJECT)
    assert keys(destination) == [OBJECT]


def test_a_server_that_was_killed_and_came_back_has_what_it_took(s3_server: S3Server) -> None:
    del s3_server  # where there is one, there can be another
    with S3Server() as server, opened(config(server)) as destination:
        put(destination, OBJECT, b"x")
        server.kill()
        with pytest.raises(DestinationError):
            destination.stat(OBJECT)
        server.start()
        assert get(destination, OBJECT) == b"x"


@pytest.mark.parametrize(
    ("code", "status", "message", "hint"),
    [
        ("IllegalLocationConstraintException", 400, "", "another region"),
        ("AuthorizationHeaderMalformed", 400, "the region 'x' is wrong; expecting 'eu-north-1'", "region: eu-north-1"),
        ("SignatureDoesNotMatch", 403, "", "credentials"),
        ("ExpiredToken", 400, "", "credentials"),
        ("BadDigest", 400, "", "in transit"),
        ("Strange", 400, "unheard of", "server's log"),
    ],
)
def test_every_answer_comes_with_a_next_step(
    s3_server: S3Server, code: str, status: int, message: str, hint: str
) -> None:
    error = ClientError(
        {
            "Error": {"Code": code, "Message": message},
            "ResponseMetadata": {
                "HTTPStatusCode": status,
                "HTTPHeaders": {},
                "RequestId": "",
                "HostId": "",
                "RetryAttempts": 0,
            },
        },
        "PutObject",
    )
    told = Explainer("offsite", config(s3_server)).explain(error, "writing a", "a")
    assert hint in told.hint
    assert code in told.detail
    assert "offsite" in told.message


def test_uploads_that_others_left_a_day_ago_are_cleared_and_younger_ones_are_not(s3_server: S3Server) -> None:
    where = config(s3_server, "unfinished")
    with contextlib.closing(s3_server.client()) as client:
        client.create_multipart_upload(Bucket=where.bucket, Key=f"{where.prefix}/{OBJECT}")
    with opened(where) as today:
        assert list(today.leftovers()) == []
        assert today.clear_leftovers() == 0
    with opened(where, clock=lambda: datetime(2100, 1, 1, tzinfo=UTC)) as later:
        assert [name.partition(" ")[0] for name in later.leftovers()] == [OBJECT]
        assert later.clear_leftovers() == 1
        assert list(later.leftovers()) == []
        later.put(OBJECT, io.BytesIO(b"x"))
