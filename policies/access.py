"""What the configuration says about the REST interface and the web page."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from policies.fields import Duration, LocalPath, Section, Words


def _listen(text: str) -> str:
    host, found, port = text.rpartition(":")
    if not found or not host or not port.isascii() or not port.isdigit() or not 0 < int(port[:6]) < 65536:
        raise ValueError("must be ADDRESS:PORT, as in 127.0.0.1:8642 or [::1]:8642")
    return text


class Tls(Section):
    """The certificate of the REST interface and the web page."""

    certificate: LocalPath = Field(description="The certificate, with what is between it and its root, as PEM.",
                                   examples=["/etc/backupd/tls.pem"])
    key: LocalPath = Field(description="Its private key, as PEM, without a passphrase.",
                           examples=["/etc/backupd/tls.key"])


class Api(Section):
    """The REST interface and the web page."""

    enabled: bool = Field(True, description="Whether the service offers them.", examples=[False])
    listen: Annotated[str, AfterValidator(_listen)] = Field(
        "127.0.0.1:8642", description="Address and port to listen on.", examples=["127.0.0.1:8642"])
    tls: Tls | None = Field(None, description="Without it connections are in the clear, which `check` warns of where "
                                              "others than this host can connect.")
    url: Words | None = Field(None, description="The address that people reach it at, for the links in mails; by "
                                                "default made of listen.", examples=["https://backup.example.com"])
    metrics: Literal["auto", "open", "token"] = Field(
        "auto", examples=["token"],
        description="Who may read /metrics: anybody who can connect, or holders of a token; `auto` asks for a token "
                    "where others than this host can connect.")
    session: Duration = Field("12h", validate_default=True, examples=["12h"],
                              description="How long somebody stays logged in to the web page.")
