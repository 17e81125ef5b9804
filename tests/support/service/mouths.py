"""What the five mouths of an installation say of one server at one moment: the command line, REST, the page, the
metrics and the mail. Whatever two of them tell, they tell alike."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx

from backupd.alerts.rules import title_of
from backupd.model.event import Incident
from backupd.model.text import format_time, parse_time

Command = Callable[..., Any]
"""``command("timeline", "db1")``: the JSON document of a command, whatever its exit code."""
RANK = {"good": 0, "warning": 1, "bad": 2}
BADGES = {"good": "well", "warning": "needs attention", "bad": "below its recovery objectives"}
VERDICTS = {
    "good": r"(The server meets its|All \d+ servers meet their) recovery objectives",
    "warning": r"\d+ of \d+ servers? needs? attention",
    "bad": r"\d+ of \d+ servers? (does not meet its|do not meet their) recovery objectives",
}
"""The heading of the first page, by the worst of its servers."""


def plain(page: str) -> str:
    """The text of a page, as ``words``."""
    return words(html.unescape(re.sub(r"<[^>]+>", " ", page.partition("<main")[2].partition(">")[2])))


def words(text: str) -> str:
    """In one line, without spans of time: those go on from one look to the next."""
    return re.sub(r"(\b\d+(\.\d+)?[smhd] ?\b)+", "SPAN ", " ".join(text.split()))


@dataclass(frozen=True)
class State:
    """What was said. ``told``: what the command line lists as open."""

    server: dict[str, Any]
    timeline: dict[str, Any]
    told: list[dict[str, Any]]
    backups: list[dict[str, Any]]
    stream: dict[str, Any]

    @property
    def status(self) -> str:
        return str(self.server["status"])

    @property
    def reasons(self) -> list[str]:
        return [reason["text"] for reason in self.server["reasons"]]

    @property
    def kinds(self) -> set[str]:
        return {one["kind"] for one in self.told}


@dataclass(frozen=True)
class Mouths:
    """``command``: of the command line; ``http``: with the token of a viewer; ``name``: of the only server.
    ``slack``: a stream goes on while they are asked one after the other, so what they call the newest moment may be so
    far apart."""

    command: Command
    http: httpx.Client
    name: str
    slack: timedelta = timedelta(0)

    def agree(self) -> State:
        """What they say, compared."""
        state = State(
            self._get(f"/v1/servers/{self.name}"),
            self.command("timeline", self.name),
            self.command("alerts"),
            self.command("backups", self.name),
            self.command("binlog", "status", self.name)[0],
        )
        self._moments(state)
        self._counts(state)
        self._incidents(state)
        self._stream(state)
        self._metrics(state)
        self._pages(state)
        return state

    def clean(self) -> State:
        """All of them say that nothing is wrong."""
        state = self.agree()
        assert (state.status, state.reasons, state.told) == ("good", [], []), (state.reasons, state.told)
        assert (state.timeline["warnings"], state.timeline["objectives"]["kept"]) == ([], True)
        return state

    def _get(self, address: str) -> Any:
        answer = self.http.get(address)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def _moments(self, state: State) -> None:
        """The same newest and oldest moment, the same promises, the same reach of each destination."""
        server, line, rest = state.server, state.timeline, self._get(f"/v1/servers/{self.name}/timeline")
        windows = [window["from"] for window in line["windows"]]
        assert self._same(server["latest"], line["latest"])
        assert self._same(server["latest"], rest["latest"])
        assert server["first"] == min(windows, default=None)
        assert server["tables_only"] == line["tables_only"] == rest["tables_only"]
        for promise in ("rpo_kept", "rto_kept"):
            assert server[promise] == line["objectives"][promise] == rest["objectives"][promise], promise
        for told in (line, rest):
            for one, other in zip(server["destinations"], told["destinations"], strict=True):
                assert (one["name"], one["trouble"]) == (other["name"], other["trouble"])
                assert self._same(one["latest"], other["latest"])
        assert line["warnings"] == rest["warnings"]
        if line["warnings"] or not line["objectives"]["kept"]:
            assert state.status != "good", line
        if not line["objectives"]["kept"]:
            assert state.status == "bad", state.reasons

    def _same(self, one: str | None, other: str | None) -> bool:
        if one is None or other is None:
            return one == other
        return abs(parse_time(one) - parse_time(other)) <= self.slack

    def _counts(self, state: State) -> None:
        server, line, rest = state.server, state.timeline, self._get(f"/v1/backups?server={self.name}&limit=500")
        assert (server["windows"], server["gaps"]) == (len(line["windows"]), len(line["gaps"]))
        assert sorted(one["id"] for one in state.backups) == sorted(one["id"] for one in rest)
        for told in (state.backups, rest):
            own = [one for one in told if one["state"] == "complete" and not one["foreign"]]
            assert server["backups"] == len(own)
            assert server["protected"] == sum(one["protected"] for one in own)

    def _incidents(self, state: State) -> None:
        rest = self._get("/v1/alerts?limit=500")
        assert [one["id"] for one in state.told] == [one["id"] for one in rest]
        assert [one["message"] for one in state.told] == [one["message"] for one in rest]
        own = [one for one in state.told if one["server"] == self.name]
        assert {one["id"] for one in state.server["incidents"]} == {one["id"] for one in own}
        if any(RANK[state.status] == 0 for one in own):
            raise AssertionError(f"all is well, and open is {own}")

    def _stream(self, state: State) -> None:
        said = state.server["stream"]
        assert state.stream["state"] == (said["state"] if said is not None else "off")

    def _metrics(self, state: State) -> None:
        found = dict(re.findall(r"^(backupd_\S+) (\S+)$", self.http.get("/metrics").text, re.MULTILINE))
        server = state.server

        def value(name: str) -> float | None:
            text = found.get(f'backupd_server_{name}{{server="{self.name}"}}')
            return float(text) if text is not None else None

        assert value("status") == RANK[state.status]
        assert value("recoverable") == (server["latest"] is not None and not server["tables_only"])
        stamp = value("latest_recoverable_timestamp_seconds")
        assert self._same(server["latest"], format_time(datetime.fromtimestamp(stamp, UTC)) if stamp else None)
        assert (value("gaps"), value("windows")) == (server["gaps"], server["windows"])
        assert (value("backups"), value("protected_backups")) == (server["backups"], server["protected"])
        for severity in ("warning", "error"):
            opened = sum(one["severity"] == severity for one in state.told)
            assert float(found[f'backupd_incidents_open{{severity="{severity}"}}']) == opened, state.told
        if server["stream"] is not None:
            up = float(found[f'backupd_stream_up{{server="{self.name}"}}'])
            assert up == (server["stream"]["state"] == "streaming")

    def _pages(self, state: State) -> None:
        accept = {"Accept": "text/html"}
        first, own, alerts = (
            plain(self.http.get(address, headers=accept).text) for address in ("/", f"/servers/{self.name}", "/alerts")
        )
        server = state.server
        assert BADGES[state.status] in own
        assert re.search(VERDICTS[state.status], first), first
        if server["latest"] is None:
            assert "recoverable now" not in first, first
        for page in (first, own):
            moment = re.search(r"(?:ago|now) (\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)Z", page) if server["latest"] else None
            assert moment is not None or "✗ nothing" in page, page
            assert moment is None or abs(
                parse_time(f"{moment[1].replace(' ', 'T')}Z") - parse_time(server["latest"])
            ) <= self.slack + timedelta(seconds=1)
            for reason in server["reasons"]:
                assert words(reason["text"]) in page
                assert words(reason["hint"]) in page
        for one in state.told:
            assert words(one["message"]) in alerts, alerts
        assert f"{server['backups']} {server['protected']} protected" in own


def mailed(subjects: Sequence[str], incidents: Sequence[Incident]) -> None:
    """Each incident was told when it opened, and when it was over, and nothing else was."""
    for one in incidents:
        title = title_of(one)
        assert f"[backupd] {str(one.severity).upper()} {title}" in subjects, (title, subjects)
        over = f"[backupd] RECOVERED {title}" in subjects
        assert over == (not one.is_open), (title, subjects)
