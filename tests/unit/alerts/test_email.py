"""Mail against real mail servers: one that works, and ones that are down, slow, refuse, or want more than a
greeting."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from email.parser import Parser
from email.policy import default
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateNotFound
from pydantic import ValidationError

from backupd.alerts import email as mail
from backupd.alerts.channels import TRIES, Delivered, DeliveryError, is_over, pause_after, ping
from backupd.alerts.email import Envelope, as_mail, send
from backupd.alerts.message import Letter
from policies.alerts import Email
from tests.support.service.mail_server import MailBox, certificate, mail_server
from tests.support.service.serving import held_port

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
LETTER = Letter("[backupd] TEST naïve 🐬", "Grüße", footer="backupd")
DBA, NIGHT = "dba@example.com", "night@example.com"


def settings(smtp: str, **changes: Any) -> Email:
    return Email.model_validate(
        {"smtp": smtp, "from": "backupd@example.com", "to": [DBA, NIGHT], "timeout": "4m", **changes}
    )


def post(email: Email) -> Delivered:
    return send(email, as_mail(LETTER, email, Envelope("m1", NOW), "here"), email.to)


@pytest.fixture(scope="module")
def pem(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return certificate(tmp_path_factory.mktemp("tls"))


def test_a_mail_whose_html_cannot_be_made_goes_out_as_text_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(_letter: Letter) -> str:
        raise TemplateNotFound("letter.html")

    monkeypatch.setattr(Letter, "as_html", gone)
    email = settings("smtp://localhost:25", to=[DBA])
    came = Parser(policy=default).parsestr(as_mail(LETTER, email, Envelope("m1", NOW), "here"))
    assert (came["Subject"], came["To"]) == (LETTER.subject_line, DBA), "nothing is wrong with the headers"
    assert came.get_body(("html",)) is None
    text = came.get_body(("plain",))
    assert text is not None
    assert text.get_content().splitlines()[0] == "Grüße"
    assert "letter.html cannot be rendered (TemplateNotFound: letter.html). Reinstall" in text.get_content()


def test_a_mail_arrives_as_text_and_html_at_every_recipient() -> None:
    with mail_server() as box:
        assert post(settings(box.url)) == Delivered()
    (came,) = box.mails
    assert (came["Subject"], box.recipients) == ("[backupd] TEST naïve 🐬", [(DBA, NIGHT)])
    text, html = came.get_body(("plain",)), came.get_body(("html",))
    assert text is not None
    assert html is not None
    assert "Grüße" in text.get_content()
    assert "<p>Grüße</p>" in html.get_content()
    assert max(map(len, box.raw[0].splitlines())) <= 998


def test_a_mail_server_that_is_down_is_tried_again() -> None:
    with held_port() as port, pytest.raises(DeliveryError, match=r"localhost:\d+ does not answer") as failure:
        post(settings(f"smtp://localhost:{port}"))
    assert not failure.value.permanent


def test_a_mail_server_that_says_nothing_takes_no_longer_than_the_time_for_one_answer() -> None:
    with silent() as port, pytest.raises(DeliveryError, match="does not answer") as failure:
        began = time.monotonic()
        post(settings(f"smtp://127.0.0.1:{port}", timeout="200ms"))
    assert time.monotonic() - began < 200
    assert ("timed out" in failure.value.detail, failure.value.permanent) == (True, False)


def test_a_mail_server_that_drips_its_answer_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mail, "_ANSWERS", 2)
    with silent(drip=b"2") as port, pytest.raises(DeliveryError, match="refused the connection") as failure:
        began = time.monotonic()
        post(settings(f"smtp://127.0.0.1:{port}", timeout="1s"))
    assert 1.5 < time.monotonic() - began < 200
    assert not failure.value.permanent


@pytest.mark.parametrize(("answer", "permanent"), [("550 spam", True), ("451 later", False), ("552 too big", True)])
def test_a_refused_mail_is_tried_again_only_when_that_may_help(answer: str, permanent: bool) -> None:
    with mail_server(MailBox(answer=answer)) as box:
        with pytest.raises(DeliveryError, match="rejected the message") as failure:
            post(settings(box.url))
    assert (failure.value.permanent, answer[:3] in failure.value.detail) == (permanent, True)


@pytest.mark.parametrize(
    ("answers", "permanent"),
    [({DBA: "550 nobody", NIGHT: "550 nobody"}, True), ({DBA: "550 nobody", NIGHT: "450 grey"}, False)],
)
def test_a_mail_that_is_taken_for_nobody_fails(answers: dict[str, str], permanent: bool) -> None:
    with (
        mail_server(MailBox(answers=answers)) as box,
        pytest.raises(DeliveryError, match="rejected all 2 recipients") as failure,
    ):
        post(settings(box.url))
    assert failure.value.permanent is permanent
    assert DBA in failure.value.detail


def test_those_who_are_refused_for_now_are_tried_again_alone() -> None:
    with mail_server(MailBox(answers={NIGHT: "450 grey"})) as box:
        assert post(settings(box.url)) == Delivered((NIGHT,), f"{NIGHT}: 450 grey")
    with mail_server(MailBox(answers={NIGHT: "550 nobody token=s3cret"})) as box:
        assert post(settings(box.url)) == Delivered(
            (), f"{NIGHT}: 550 nobody token=[hidden]", ((NIGHT, "550 nobody token=[hidden]"),)
        )
    assert box.recipients == [(DBA,)]


def test_starttls_and_login_are_done_where_they_are_wanted(tmp_path: Path, pem: Path) -> None:
    word = tmp_path / "word"
    word.write_text("geheim\n")
    with mail_server(tls=pem, login=("ops", "geheim")) as box:
        email = settings(box.url, user="ops", password_file=str(word), ca_file=str(pem))
        assert post(email) == Delivered()
        assert (box.encrypted, box.users) == ([True], ["ops"])
        with pytest.raises(DeliveryError, match="TLS handshake with the mail server"):  # nobody vouches for it
            post(settings(box.url, user="ops", password_file=str(word)))
        with pytest.raises(DeliveryError, match="TLS handshake with the mail server"):
            post(settings(box.url, starttls="required"))
        word.write_text("wrong\n")
        with pytest.raises(DeliveryError, match="user and password") as failure:
            post(email)
        assert not failure.value.permanent
        assert "wrong" not in str(failure.value)
        word.write_text("")
        with pytest.raises(DeliveryError, match="holds no password"):
            post(email)
        with pytest.raises(DeliveryError, match=r"rejected the message|rejected all"):  # it wants a login
            post(settings(box.url, ca_file=str(pem)))


def test_encryption_is_taken_where_it_is_offered_and_no_password_goes_where_it_is_not(
    tmp_path: Path, pem: Path
) -> None:
    word = tmp_path / "word"
    word.write_text("geheim\n")
    with mail_server(tls=pem) as box:
        assert post(settings(box.url)) == Delivered()
        assert box.encrypted == [True]
    with mail_server() as box:
        with pytest.raises(DeliveryError, match="no STARTTLS"):
            post(settings(box.url, user="ops", password_file=str(word)))
        with pytest.raises(DeliveryError, match="no STARTTLS"):
            post(settings(box.url, starttls="required"))
        assert box.mails == []


def test_an_account_that_cannot_be_said_is_told_and_holds_nothing_up(tmp_path: Path) -> None:
    word = tmp_path / "word"
    word.write_text("gehäim\n")
    pem = certificate(tmp_path)
    with (
        mail_server(tls=pem, login=("ops", "x")) as box,
        pytest.raises(DeliveryError, match="characters that SMTP cannot send") as told,
    ):
        post(settings(box.url, user="ops", password_file=str(word), ca_file=str(pem)))
    assert "häim" not in str(told.value)


@pytest.mark.parametrize(
    "address",
    [
        "dba@example.com",
        "dba@localhost",
        "a+b.c@x-y.example",
        "o'neil@x.y",
        "dbä@exämple.com",
        "ops@[192.0.2.1]",
        "ops@[IPv6:2001:db8::1]",
        "x" * 64 + "@" + "y" * 63 + ".example.com",
        "=@x.y",
        "a!#$%&*/?^_`{|}~@x.y",
    ],
)
def test_an_address_that_the_configuration_takes_stands_in_the_header_as_it_is(address: str) -> None:
    email = Email.model_validate({"smtp": "smtp://h", "from": address, "to": [address, DBA]})
    came = Parser(policy=default).parsestr(as_mail(LETTER, email, Envelope("m1", NOW), "here"))
    assert [one.addr_spec for one in came["To"].addresses] == [address, DBA]
    assert came["From"].addresses[0].addr_spec == address


@pytest.mark.parametrize(
    "address",
    [
        "dba@[bad",
        "boss@[",
        "a..b@x.y",
        ".a@x.y",
        "a.@x.y",
        "a@.x",
        "a@x..y",
        "a@x.y.",
        "a;b@x.y",
        "a:b@x.y",
        "a(x)@x.y",
        '"a@x.y',
        'a"b"@x.y',
        "a\\b@x.y",
        "a@@x.y",
        "a@b@c",
        "[x]@x.y",
        "a@x;y",
        "a@(x)",
        "a@x,b@y",
        "a\x00@x.y",
        "\ud800@x.y",
        "a\u202e@x.y",
        "=?utf-8?q?x?=@x.y",
        "a b@x.y",
        "a@x.y\nBcc: b@x.y",
        "x" * 320 + "@x.y",
        "@x.y",
        "a@",
    ],
)
def test_an_address_that_no_header_can_hold_is_refused_and_were_it_not_the_mail_is_written_all_the_same(
    address: str,
) -> None:
    with pytest.raises(ValidationError, match="not a mail address"):
        settings("smtp://h", to=[address])
    email = settings("smtp://h").model_copy(update={"to": (address, DBA), "sender": address})
    assert "Message-ID: <" in as_mail(LETTER, email, Envelope("m1", NOW, ("i1",), begins=True), "here")


def test_a_mail_whose_headers_cannot_be_written_arrives_without_them_and_says_so() -> None:
    with mail_server() as box:
        email = settings(box.url).model_copy(update={"to": ("boss@[bad",)})
        send(email, as_mail(LETTER, email, Envelope("m1", NOW), "here"), [DBA])
    (came,) = box.mails
    body = came.get_body(("plain",))
    assert body is not None
    assert came["Subject"] == LETTER.subject
    assert "Grüße" in body.get_content()
    assert "alerts.email" in body.get_content()


def test_the_heartbeat_does_not_wait_for_a_watcher_that_drips_its_answer() -> None:
    with silent(drip=b"H") as port, pytest.raises(DeliveryError, match="does not answer"):
        began = time.monotonic()
        ping(f"http://127.0.0.1:{port}/", timeout=240, longest=0.4)
    assert time.monotonic() - began < 200
    with silent(drip=b"HTTP/1.0 200 OK\r\n\r\n") as port:
        ping(f"http://127.0.0.1:{port}/", timeout=240, longest=240)  # well, though its answer never ends


def test_a_message_is_given_up_by_its_tries_as_well_as_its_age_since_clocks_lie() -> None:
    days = timedelta(days=1)
    assert not is_over(TRIES - 1, 700 * days)
    assert not is_over(TRIES, 2 * days)
    assert is_over(TRIES, 3 * days)
    assert is_over(TRIES, -700 * days)
    assert 2.5 * days < sum((pause_after(tries) for tries in range(1, TRIES)), timedelta()) < 3.5 * days


def test_the_pauses_between_tries_grow_to_an_hour() -> None:
    assert [pause_after(tries).total_seconds() / 60 for tries in (1, 2, 3, 6, 7, 500)] == [1, 2, 4, 32, 60, 60]


@contextmanager
def silent(drip: bytes = b"") -> Iterator[int]:
    """A server that takes connections and says nothing, or ``drip`` again and again."""
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as door:

        def serve() -> None:
            with suppress(OSError):
                guest, _address = door.accept()
                with guest:
                    while not over.wait(0.05):
                        if drip:
                            guest.sendall(drip)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield door.getsockname()[1]
        finally:
            over.set()
            with suppress(OSError):
                socket.create_connection(door.getsockname(), 240).close()
            thread.join()
