"""The act of the demo in which others come in: a restore by the REST interface, and mail about a backup that fails."""

from __future__ import annotations

import contextlib
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from email.message import EmailMessage
from pathlib import Path
from typing import Any

from postbox import Postbox
from scenery import SERVER
from stage import CommandLine, DemoFailedError, expect, say, service, stopped_at_the_end, until

from tests.support import sample
from tests.support.servers.mariadb import connect


class Rest:
    """Asks the REST interface, and shows it as one would type it."""

    def __init__(self, port: int, token: str) -> None:
        self._root, self._token = f"http://127.0.0.1:{port}", token

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """GET, or POST of ``body``; gives the document. Raises DemoFailedError with what the answer says."""
        say(f'\n$ curl -H "$AUTHORIZATION" $URL{path}' + (f" -d '{json.dumps(body)}'" if body is not None else ""))
        try:
            with self._open(path, body) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise DemoFailedError(f"{path}: {error.status} {error.read().decode()}") from error

    def is_there(self) -> bool:
        try:
            with self._open("/healthz", None) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def progress(self, job: str) -> Iterator[dict[str, Any]]:
        """What the job says of itself while it goes on, as server-sent events."""
        say(f"\n$ curl -N -H \"$AUTHORIZATION\" '$URL/v1/events?job={job}'")
        with self._open(f"/v1/events?job={job}", None, accept="text/event-stream") as stream:
            kind = ""
            for raw in stream:
                name, _, value = raw.decode().rstrip("\n").partition(": ")
                if name == "event":
                    kind = value
                elif name == "data" and kind == "job":
                    yield json.loads(value)

    def _open(self, path: str, body: dict[str, Any] | None, accept: str = "application/json") -> Any:
        request = urllib.request.Request(
            self._root + path,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {self._token}", "Accept": accept, "Content-Type": "application/json"},
        )
        return urllib.request.urlopen(request, timeout=120)


def by_rest(rest: Rest, target: str, datadir: Path, sums: dict[str, int]) -> None:
    """A restore from the plan to a server that answers, without the command line."""
    for server in rest.ask("/v1/servers"):
        say(f"{server['name']}: {server['status']}, recoverable until {server['latest']}")
    plan = rest.ask(
        "/v1/restores/plan",
        {"server": SERVER, "target": target, "mode": "new-server", "datadir": str(datadir), "start": True},
    )
    say(f"plan {plan['id']}: {plan['bytes_stored'] / 2**20:.0f} MiB, about {plan['seconds']:.0f} s")
    started = rest.ask("/v1/restores", {"plan": plan["id"]})
    phase = ""
    for job in rest.progress(started["job"]["id"]):
        if job["progress"] and job["progress"]["phase"] != phase:
            phase = job["progress"]["phase"]
            say(f"  {phase} ...")
        if job["state"] not in ("queued", "running"):
            break
    done = rest.ask(f"/v1/restores/{started['restore']['id']}")
    expect(
        done["state"] == "succeeded",
        f"restore {done['id']} succeeded: "
        + ", ".join(f"{one['name']} {one['seconds']:.1f} s" for one in done["phases"] if one["state"] == "done"),
    )
    started = done["outcome"]["started"]
    with stopped_at_the_end(started["pid"]), contextlib.closing(connect(started["socket"])) as fresh:
        expect(
            sample.checksum_everything(fresh) == sums,
            f"the checksums of all {len(sums)} tables equal the source's right before the DELETE",
        )


def mail_about_a_failure(rest: Rest, postbox: Postbox, repository: Path) -> None:
    """A backup fails because its destination is not mounted; one mail says so, and one that it is well again."""
    away = repository.with_name("not-mounted")
    before = len(postbox.arrived)
    repository.rename(away)
    say(f"gone: {repository}")
    try:
        rest.ask("/v1/backups", {"server": SERVER, "kind": "full"})
        told = until(lambda: _about(postbox.arrived[before:]), "a mail about the failure")
        show(told)
    finally:
        away.rename(repository)
    say(f"\nback again: {repository}")
    rest.ask("/v1/backups", {"server": SERVER, "kind": "full"})
    well = until(
        lambda: next(
            (
                mail
                for mail in postbox.arrived[before:]
                if mail["References"] and told["Message-ID"] in mail["References"]
            ),
            None,
        ),
        "a mail that it is well again",
    )
    say(f"\nSubject: {well['Subject']}")
    expect(True, "one mail when it failed, one when it was well again, in one thread")


def _about(mails: list[EmailMessage]) -> EmailMessage | None:
    return next((mail for mail in mails if SERVER in str(mail["Subject"])), None)


def show(mail: EmailMessage) -> None:
    """A mail as its reader sees it."""
    text = mail.get_body(("plain",))
    say(
        "\n".join(
            f"   | {line}"
            for line in (
                f"From: {mail['From']}",
                f"To: {mail['To']}",
                f"Subject: {mail['Subject']}",
                "",
                *(str(text.get_content()).splitlines() if text is not None else ()),
            )
        )
    )


def others_come_in(
    base: Path, backupd: CommandLine, postbox: Postbox, port: int, target: str, sums: dict[str, int]
) -> None:
    """The whole act."""
    token = backupd.ask("token", "create", "--role", "operator", "--name", "anna", "--expires", "1d")["token"]
    say("(shown once; only its digest is kept)")
    rest = Rest(port, token)
    with service(backupd):
        until(rest.is_there, "the REST interface answers")
        by_rest(rest, target, base / "restores" / "by-rest", sums)
        mail_about_a_failure(rest, postbox, base / "backups")
    backupd.show("audit")
