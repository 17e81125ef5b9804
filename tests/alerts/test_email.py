"""Mail against real mail servers: one that works, and ones that are down, slow, refuse, or want more than a greeting.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from backupd.alerts import email as mail
from backupd.alerts.delivery import Delivered, DeliveryError, pause_after
from backupd.alerts.email import Envelope, as_mail, send
from backupd.alerts.letter import Letter
from policies.alerts import Email
from tests.support.mailserver import MailBox, certificate, free_port, mail_server

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
LETTER = Letter("[backupd] TEST naïve 🐬", "Grüße", footer="backupd")
DBA, NIGHT = "dba@example.com", "night@example.com"


def settings(smtp: str, **changes: Any) -> Email:
    return Email.model_validate({"smtp": smtp, "from": "backupd@example.com", "to": [DBA, NIGHT], "timeout": "5s",
                                 **changes})


def post(email: Email) -> Delivered:
    return send(email, as_mail(LETTER, email, Envelope("m1", NOW), "here"), email.to)


@pytest.fixture(scope="module")
def pem(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return certificate(tmp_path_factory.mktemp("tls"))


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
    with pytest.raises(DeliveryError, match=r"localhost:\d+ does not answer") as failure:
        post(settings(f"smtp://localhost:{free_port()}"))
    assert not failure.value.permanent


def test_a_mail_server_that_says_nothing_takes_no_longer_than_the_time_for_one_answer() -> None:
    with silent() as port, pytest.raises(DeliveryError, match="does not answer") as failure:
        began = time.monotonic()
        post(settings(f"smtp://127.0.0.1:{port}", timeout="200ms"))
    assert time.monotonic() - began < 5
    assert ("timed out" in failure.value.detail, failure.value.permanent) == (True, False)


def test_a_mail_server_that_drips_its_answer_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mail, "_ANSWERS", 2)
    with silent(drip=b"2") as port, pytest.raises(DeliveryError, match="turns us away") as failure:
        began = time.monotonic()
        post(settings(f"smtp://127.0.0.1:{port}", timeout="300ms"))
    assert 0.5 < time.monotonic() - began < 5
    assert not failure.value.permanent


@pytest.mark.parametrize(("answer", "permanent"), [("550 spam", True), ("451 later", False), ("552 too big", True)])
def test_a_refused_mail_is_tried_again_only_when_that_may_help(answer: str, permanent: bool) -> None:
    with mail_server(MailBox(answer=answer)) as box:
        with pytest.raises(DeliveryError, match="refuses the message") as failure:
            post(settings(box.url))
    assert (failure.value.permanent, answer[:3] in failure.value.detail) == (permanent, True)


@pytest.mark.parametrize(("answers", "permanent"), [
    ({DBA: "550 nobody", NIGHT: "550 nobody"}, True), ({DBA: "550 nobody", NIGHT: "450 grey"}, False)])
def test_a_mail_that_is_taken_for_nobody_fails(answers: dict[str, str], permanent: bool) -> None:
    with mail_server(MailBox(answers=answers)) as box, pytest.raises(DeliveryError, match="none of 2") as failure:
        post(settings(box.url))
    assert failure.value.permanent is permanent
    assert DBA in failure.value.detail


def test_those_who_are_refused_for_now_are_tried_again_alone() -> None:
    with mail_server(MailBox(answers={NIGHT: "450 grey"})) as box:
        assert post(settings(box.url)) == Delivered((NIGHT,), f"{NIGHT}: 450 grey")
    with mail_server(MailBox(answers={NIGHT: "550 nobody token=s3cret"})) as box:
        assert post(settings(box.url)) == Delivered((), f"{NIGHT}: 550 nobody token=[hidden]")
    assert box.recipients == [(DBA,)]


def test_starttls_and_login_are_done_where_they_are_wanted(tmp_path: Path, pem: Path) -> None:
    word = tmp_path / "word"
    word.write_text("geheim\n")
    with mail_server(tls=pem, login=("ops", "geheim")) as box:
        email = settings(box.url, user="ops", password_file=str(word), ca_file=str(pem))
        assert post(email) == Delivered()
        assert (box.encrypted, box.users) == ([True], ["ops"])
        with pytest.raises(DeliveryError, match="no encrypted connection"):  # nobody vouches for it
            post(settings(box.url, user="ops", password_file=str(word)))
        with pytest.raises(DeliveryError, match="no encrypted connection"):
            post(settings(box.url, starttls="required"))
        word.write_text("wrong\n")
        with pytest.raises(DeliveryError, match="user and password") as failure:
            post(email)
        assert not failure.value.permanent
        assert "wrong" not in str(failure.value)
        word.write_text("")
        with pytest.raises(DeliveryError, match="holds no password"):
            post(email)
        with pytest.raises(DeliveryError, match=r"refuses|none of"):  # it wants a login
            post(settings(box.url, ca_file=str(pem)))


def test_encryption_is_taken_where_it_is_offered_and_no_password_goes_where_it_is_not(
        tmp_path: Path, pem: Path) -> None:
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
                socket.create_connection(door.getsockname(), 1).close()
            thread.join()
