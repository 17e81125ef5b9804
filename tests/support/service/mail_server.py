"""A real mail server that keeps what it takes, and goes wrong in the ways that mail servers do."""

from __future__ import annotations

import datetime
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.message import EmailMessage
from email.parser import BytesParser
from email.policy import default
from pathlib import Path
from typing import Any

from aiosmtpd.controller import Controller
from aiosmtpd.smtp import AuthResult, Envelope, LoginPassword, Session
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@dataclass
class MailBox:
    """What came in, and how the server behaves: ``answers`` to RCPT by address, ``answer`` to DATA."""

    answers: dict[str, str] = field(default_factory=dict)
    answer: str = "250 taken"
    mails: list[EmailMessage] = field(default_factory=list)
    raw: list[bytes] = field(default_factory=list)
    recipients: list[tuple[str, ...]] = field(default_factory=list)
    encrypted: list[bool] = field(default_factory=list)
    users: list[str] = field(default_factory=list)
    port: int = 0
    came: threading.Condition = field(default_factory=threading.Condition)

    async def handle_RCPT(  # noqa: N802  theirs
        self,
        server: Any,
        session: Session,
        envelope: Envelope,
        address: str,
        options: list[str],
    ) -> str:
        if address in self.answers:
            return self.answers[address]
        envelope.rcpt_tos.append(address)
        return "250 OK"

    async def handle_DATA(self, server: Any, session: Session, envelope: Envelope) -> str:  # noqa: N802  theirs
        if self.answer.startswith("250"):
            content = envelope.content if isinstance(envelope.content, bytes) else b""
            mail = BytesParser(policy=default).parsebytes(content)
            assert isinstance(mail, EmailMessage)
            with self.came:
                self.mails.append(mail)
                self.raw.append(content)
                self.recipients.append(tuple(envelope.rcpt_tos))
                self.encrypted.append(session.ssl is not None)
                self.came.notify_all()
        return self.answer

    def wait(self, condition: Callable[[], bool], seconds: float = 240) -> None:
        with self.came:
            assert self.came.wait_for(condition, seconds), self.subjects()

    def subjects(self) -> list[str]:
        with self.came:
            return [str(mail["Subject"]) for mail in self.mails]

    @property
    def url(self) -> str:
        return f"smtp://localhost:{self.port}"


@contextmanager
def mail_server(
    box: MailBox | None = None, *, tls: Path | None = None, login: tuple[str, str] | None = None, port: int = 0
) -> Iterator[MailBox]:
    """``tls``: of ``certificate``; the server then wants STARTTLS. ``login``: user and password that it wants."""
    box = box or MailBox()
    options: dict[str, Any] = {}
    if tls is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tls)
        options |= {"tls_context": context, "require_starttls": True}
    if login is not None:

        def check(server: Any, session: Session, envelope: Envelope, mechanism: str, data: Any) -> AuthResult:
            assert isinstance(data, LoginPassword)
            box.users.append(data.login.decode())
            return AuthResult(success=(data.login.decode(), data.password.decode()) == login, handled=False)

        options |= {"authenticator": check, "auth_required": True, "auth_require_tls": tls is not None}
    controller = Controller(box, hostname="127.0.0.1", port=port or free_port(), ready_timeout=240, **options)
    controller.start()
    box.port = controller.port
    try:
        yield box
    finally:
        controller.stop()


def free_port() -> int:
    import socket

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def certificate(folder: Path, name: str = "localhost") -> Path:
    """A file with a certificate of ``name``, signed by itself, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=30))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    file = folder / f"{name}.pem"
    file.write_bytes(
        made.public_bytes(serialization.Encoding.PEM)
        + key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return file
