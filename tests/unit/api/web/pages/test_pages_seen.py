"""The pages to look at, over a fleet with good and bad in it, by a browser that runs no script."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from html import unescape
from html.parser import HTMLParser
from urllib.parse import urlsplit

import httpx
import pytest

from api.web.pages import server as server_pages
from api.web.pages.lists import SERVERS_OF_A_PAGE, worst_first
from backupd.app.context.wiring import Wiring
from backupd.app.service.facade import Installation, Servers
from backupd.app.views.server_status import LastProof, Reason, ServerOverview, Status
from backupd.model.access import Role
from backupd.model.event import Incident, Message, MessageKind, MessageState, Severity
from backupd.model.job import JobKind, JobRecord, JobState, RestoreRecord
from backupd.model.proof import Phase
from tests.support.service.house import Clock
from tests.support.service.rig import Rig, rig
from tests.support.service.stage import CRM, EVIL, LEGACY, SHOP, Stage, settings_of

NOW = datetime(2026, 11, 21, 3, 0, tzinfo=UTC)
_VOID = {"meta", "link", "img", "input", "br", "hr", "source", "wbr"}


@pytest.fixture(scope="module")
def ids() -> dict[str, str]:
    return {}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, ids: dict[str, str]) -> Iterator[Rig]:
    def prepared(wiring: Wiring) -> None:
        ids.update(Stage(wiring, taint=EVIL).set().ids)

    with rig(settings_of(tmp_path_factory.mktemp("fleet")), prepared=prepared, clock=Clock(NOW)) as running:
        yield running


@pytest.fixture(scope="module")
def viewer(fleet: Rig) -> httpx.Client:
    client = fleet.client(Role.VIEWER)
    client.headers["Accept"] = "text/html"
    return client


def page(client: httpx.Client, path: str, status: int = 200) -> str:
    answer = client.get(path)
    assert answer.status_code == status, (path, answer.text)
    assert answer.headers["content-type"].startswith("text/html")
    assert answer.headers["cache-control"] == "no-store"
    return answer.text


def words(text: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", text))


@dataclass
class Document(HTMLParser):
    """What is wrong with a page as markup, and where it leads."""

    text: str
    troubles: list[str] = field(default_factory=list)
    links: set[str] = field(default_factory=set)
    _open: list[str] = field(default_factory=list)
    _ids: list[str] = field(default_factory=list)
    _labelled: set[str] = field(default_factory=set)
    _fields: list[Mapping[str, str | None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self.feed(self.text)
        self.troubles += [f"<{tag}> is not closed" for tag in self._open]
        self.troubles += [f"id {one} twice" for one in set(self._ids) if self._ids.count(one) > 1]
        self.troubles += [
            f"nobody says what {dict(one)} is for"
            for one in self._fields
            if one.get("id") not in self._labelled and not one.get("aria-label")
        ]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if tag not in _VOID:
            self._open.append(tag)
        if found.get("id"):
            self._ids.append(str(found["id"]))
        self.troubles += [f"{name} on <{tag}>" for name in found if name == "style" or name.startswith("on")]
        if tag == "script" and not str(found.get("src")).startswith("/static/"):
            self.troubles.append("a script on the page")
        if tag == "img" and "alt" not in found:
            self.troubles.append("an image without words")
        if tag == "label":
            self._labelled.add(str(found.get("for")))
        if tag in ("input", "select", "textarea", "progress", "meter") and found.get("type") != "hidden":
            self._fields.append(found)
        if tag == "th" and "scope" not in found:
            self.troubles.append("a heading of a table that does not say of what")
        if tag == "a" and str(found.get("href", "")).startswith("/"):
            self.links.add(str(found["href"]).partition("#")[0])

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in _VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self._open or self._open.pop() != tag:
            self.troubles.append(f"</{tag}> closes something else")


_OURS = re.compile(r"/($|servers/[^/]+$|backups/[^/]+$|jobs($|/)|proofs($|/)|destinations$|alerts$)")


def test_every_page_that_can_be_reached_is_whole_and_shows_names_as_text(
    viewer: httpx.Client,
    ids: dict[str, str],
) -> None:
    """Each kind of page three times, wherever links lead; what others wrote stands there as they wrote it."""
    waiting, seen, kinds = ["/", f"/servers/{LEGACY}", f"/jobs/{ids['running']}"], set[str](), dict[str, int]()
    tainted = set()
    while waiting:
        path = waiting.pop(0)
        parts = urlsplit(path)
        kind = (
            re.sub(r"^(/[^/]+/)[^/]+", r"\1*", parts.path)
            + "?"
            + ",".join(sorted(re.findall(r"(?:^|&)(\w+)=", parts.query)))
        )
        if path in seen or kinds.get(kind, 0) >= 2 or not _OURS.match(parts.path):
            continue
        seen.add(path)
        kinds[kind] = kinds.get(kind, 0) + 1
        document = Document(page(viewer, path))
        assert not document.troubles, (path, document.troubles)
        assert "<script>alert" not in document.text, path
        assert "onerror=" not in document.text.replace("&lt;img src=x onerror=", ""), path
        if "&lt;script&gt;alert" in document.text:
            tainted.add(kind.partition("?")[0])
        waiting += sorted(document.links)
    assert {
        "/",
        "/servers/*",
        "/backups/*",
        "/jobs",
        "/jobs/*",
        "/proofs",
        "/proofs/*",
        "/destinations",
        "/alerts",
    } <= {kind.partition("?")[0] for kind in kinds}
    assert {"/", "/servers/*", "/backups/*", "/jobs", "/jobs/*", "/proofs", "/proofs/*", "/alerts"} <= tainted, (
        "else the test shows nothing"
    )


def test_the_first_page_says_what_is_wrong_first_and_what_to_do(viewer: httpx.Client) -> None:
    text = page(viewer, "/")
    told = words(text)
    assert "2 of 3 servers do not meet their recovery objectives" in told
    assert text.index(f">{LEGACY}<") < text.index(f">{SHOP}<"), "the worst is first"
    assert re.search(rf"the full backup of {LEGACY} failed three times.*?Next: backupd check {LEGACY}", told)
    only = words(page(viewer, "/?status=bad"))
    assert LEGACY in only
    assert f"/servers/{SHOP}" not in page(viewer, "/?status=bad")
    assert "No server matches" in words(page(viewer, "/?q=zzz"))
    assert f"/servers/{CRM}" in page(viewer, "/?q=CRM&page=99")


def test_servers_are_sorted_by_what_would_be_lost() -> None:
    def server(name: str, status: Status, latest: datetime | None) -> ServerOverview:
        return ServerOverview(name, "gold", status, (Reason(status, "why"),), latest=latest)

    hour = timedelta(hours=1)
    known = [
        server("well", Status.GOOD, NOW - 9 * hour),
        server("late", Status.BAD, NOW - hour),
        server("later", Status.BAD, NOW - 2 * hour),
        server("never", Status.BAD, None),
        server("odd", Status.WARNING, NOW),
    ]
    assert [one.name for one in worst_first(known)] == ["never", "later", "late", "odd", "well"]
    assert SERVERS_OF_A_PAGE >= 100


def test_on_a_quiet_day_the_first_page_says_so_in_one_line(
    viewer: httpx.Client, fleet: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    proved = LastProof("20261120T000000Z-00000001", "20261119T000000Z-00000001", "proved", NOW - timedelta(hours=3), 9)
    calm = tuple(
        ServerOverview(
            f"db{number}",
            "gold",
            Status.GOOD,
            latest=NOW,
            rpo=timedelta(seconds=2),
            rpo_objective=timedelta(minutes=1),
            last_proof=proved,
        )
        for number in range(SERVERS_OF_A_PAGE + 5)
    )
    monkeypatch.setattr(Servers, "overview", lambda _self: calm)
    monkeypatch.setattr(Installation, "destinations", lambda _self: ())
    text = page(viewer, "/")
    count = SERVERS_OF_A_PAGE + 5
    assert f"All {count} servers meet their recovery objectives The oldest last proof is of 3h ago" in words(text)
    assert "Next:" not in text
    assert text.count('class="server-name"') == SERVERS_OF_A_PAGE
    assert re.findall('rel="(prev|next)" href="([^"]+)"', text) == [("next", "/?page=2")]
    second = page(viewer, "/?page=2")
    assert second.count('class="server-name"') == 5
    assert re.findall('rel="(prev|next)" href="([^"]+)"', second) == [("prev", "/?page=1")]
    assert f"All {count} servers" in words(second), "what stands at the top is of all"
    monkeypatch.setattr(Servers, "overview", lambda _self: ())
    assert "No server is configured that you may see" in words(page(viewer, "/"))


def test_servers_are_shown_with_their_labels_and_by_one(viewer: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    some = (
        ServerOverview("db1", "gold", Status.GOOD, labels={"env": "prod", "site": "a & b"}),
        ServerOverview("db2", "gold", Status.GOOD, labels={"env": "test"}),
        ServerOverview("db3", "gold", Status.GOOD),
    )
    monkeypatch.setattr(Servers, "overview", lambda _self: some)
    text = page(viewer, "/")
    assert re.findall(r'<a class="chip" href="([^"]+)">', text) == [
        "/?label=env%3Dprod",
        "/?label=site%3Da+%26+b",
        "/?label=env%3Dtest",
    ]
    assert re.findall(r'<option value="([^"]*=[^"]*)">', text) == ["env=prod", "env=test", "site=a &amp; b"]
    only = page(viewer, "/?label=env%3Dprod")
    assert re.findall(r'class="server-name" href="([^"]+)"', only) == ["/servers/db1"]
    assert '<option value="env=prod" selected>' in only
    assert "No server matches" in words(page(viewer, "/?label=env%3Dnone"))


def test_an_estimate_that_was_made_long_ago_says_when(viewer: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    hour = timedelta(hours=1)
    some = (
        ServerOverview("fresh", "gold", Status.GOOD, rto=hour, looked_at=NOW - timedelta(minutes=2)),
        ServerOverview("old", "gold", Status.GOOD, rto=hour, looked_at=NOW - 2 * hour),
        ServerOverview("unknown", "gold", Status.GOOD, looked_at=NOW - 2 * hour),
    )
    monkeypatch.setattr(Servers, "overview", lambda _self: some)
    rows = re.findall(r'<tbody class="server">.*?</tbody>', page(viewer, "/"), re.DOTALL)
    assert ["as of 2h ago" in words(row) for row in rows] == [False, True, False]


def test_a_moment_is_chosen_by_a_link_of_the_drawing_or_by_the_form_without_any_script(viewer: httpx.Client) -> None:
    text = page(viewer, f"/servers/{SHOP}")
    slices = re.findall(r'<a href="(/servers/[^"]*?to=[^"]+)#moment" tabindex="-1">', text)
    assert len(slices) > 50
    assert re.search(r'<input type="datetime-local" id="at" name="at" step="1" value="2026-11-21T02:59:52">', text)
    chosen = page(viewer, f"/servers/{CRM}?to=latest")
    assert re.search(r"To the latest moment .*Takes about \d+m.* To fetch \d+\.\d GiB from local", words(chosen))
    assert f'href="/restore?server={CRM}&amp;target=latest"' in chosen
    assert 'class="chosen"' in chosen
    (exact,) = re.findall(r"/servers/crm-db2\?to=(2026-11-20[^&]+)&amp;", chosen)
    assert "Restore to here" in page(viewer, f"/servers/{CRM}?to={exact}"), "a link of the drawing meets the backup"
    missed = page(viewer, f"/servers/{CRM}?at=2026-11-20T12:00:00")
    assert "Restore to here" not in missed
    near = re.findall(r'href="([^"]+)#moment">2026-11-\d\d [^<]+</a> (before|after)', missed)
    assert [side for _address, side in near] == ["before", "after"], "by the form one lands beside it, and is led there"
    for address, _side in near:
        assert "Restore to here" in page(viewer, address.replace("&amp;", "&"))


def test_a_moment_that_cannot_be_reached_is_told_on_the_page_with_the_next_step(viewer: httpx.Client) -> None:
    for query, told in (
        ("to=quatsch", "is not understood"),
        ("at=yesterday", "is not a time"),
        ("at=2020-01-01T00:00:00", "2020-01-01T00:00:00Z"),
        ("to=backup:20200101T000000Z-00000000", ""),
    ):
        text = words(page(viewer, f"/servers/{SHOP}?{query}"))
        assert told in text
        assert "✗" in text
        assert "Next:" in text
    for harmless in (
        "span=<script>",
        "begin=x&end=y",
        "begin=9999-12-31T00:00:00Z&end=9999-12-31T23:59:59Z",
        "begin=0001-01-01T00:00:00Z&end=0001-01-01T00:00:01Z",
        "span=1y",
        "span=all",
        "chains=all",
    ):
        page(viewer, f"/servers/{SHOP}?{harmless}")


def test_a_gap_is_told_in_words_and_drawn(viewer: httpx.Client) -> None:
    text = page(viewer, f"/servers/{SHOP}?span=30d")
    assert 'class="bar bar-gap"' in text
    assert "gap everywhere, 2026-11-05 22:00:00Z to 2026-11-07 22:00:00Z" in words(text)


def test_chains_list_their_members_and_what_is_marked_as_deleted_is_in_none(viewer: httpx.Client) -> None:
    text = words(page(viewer, f"/servers/{SHOP}?chains=all"))
    assert text.count("full backup and 5 increments") == 4
    assert "6 logical backups of set all" in text


def test_many_chains_come_page_by_page(viewer: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_pages, "_FAMILIES", 1)
    monkeypatch.setattr(server_pages, "CHAINS_OF_A_PAGE", 2)
    assert "Show all 6" in words(page(viewer, f"/servers/{SHOP}"))
    address, told, links = f"/servers/{SHOP}?chains=all", list[str](), 0
    while address:
        shown = page(viewer, address)
        told += re.findall(r"<summary><b>([^<]+)", shown)
        found = re.search(r'rel="next" href="([^"#]+)', shown)
        address, links = unescape(found[1]) if found else "", links + 1
    assert (len(told), links) == (6, 3)
    assert {"6 logical backups of set all", "full backup and 5 increments"} < set(told)
    assert "There is no backup yet" not in page(viewer, f"/servers/{SHOP}?chains=99999")
    for odd in ("-1", "²", "9" * 40, "x"):
        page(viewer, f"/servers/{SHOP}?chains={odd}")


def test_a_backup_is_shown_from_the_catalog_and_reads_a_destination_only_when_asked(
    viewer: httpx.Client, ids: dict[str, str]
) -> None:
    text = words(page(viewer, f"/backups/{ids['shop']}"))
    assert "Full backup of shop-db1" in text or "Increment of shop-db1" in text
    assert "Read manifest and runbook from a destination" in text
    asked = words(page(viewer, f"/backups/{ids['shop']}?read=yes"))
    assert "✗" in asked, "what keeps it from being read is told"
    assert "Next:" in asked
    assert "Not found" in words(page(viewer, "/backups/20200101T000000Z-00000000", 404))


def test_jobs_are_chosen_by_server_state_and_kind_and_go_on_page_by_page(
    viewer: httpx.Client, fleet: Rig, ids: dict[str, str]
) -> None:
    text = words(page(viewer, "/jobs"))
    assert text.index("Now") < text.index("Before")
    assert "61.0 GiB of 88.0 GiB, 920 of 1840 files, 5m 10s left" in text
    failed = page(viewer, "/jobs?state=failed")
    assert ids["running"] not in failed
    assert "Next:" in words(failed)
    assert page(viewer, "/jobs?state=nonsense&kind=<b>")
    assert "No jobs." in words(page(viewer, f"/jobs?server={LEGACY}&kind=thaw"))
    for number in range(70):
        at = NOW - timedelta(days=20, minutes=number)
        fleet.catalog.jobs.add(
            JobRecord(f"20261101T0{number:05d}Z-{number:08x}", JobKind.WITNESS, CRM, JobState.SKIPPED, at)
        )
    first = page(viewer, f"/jobs?server={CRM}&kind=witness")
    (older,) = re.findall(r'rel="next" href="([^"]+)"', first)
    second = page(viewer, older.replace("&amp;", "&"))
    assert len(set(re.findall(r"/jobs/(20261101\w+-\w+)", first + second))) == 70
    assert 'rel="next"' not in second
    page(viewer, "/jobs?after=nonsense", 422)


def test_a_running_job_goes_on_by_itself_and_shows_the_end_of_its_log(
    viewer: httpx.Client, fleet: Rig, ids: dict[str, str]
) -> None:
    from backupd.app.context.logging_setup import log_path

    log_path(fleet.settings, ids["running"]).write_text("".join(f"line {n}\n" for n in range(1000)))
    text = page(viewer, f"/jobs/{ids['running']}")
    assert f'data-events="/v1/events?job={ids["running"]}"' in text
    assert '<noscript><meta http-equiv="refresh" content="10"></noscript>' in text
    assert re.search(r'<progress id="progress" max="100" value="69\.3">', text)
    assert "line 999" in text
    assert "line 699\n" not in text
    assert "line 0\n" in page(viewer, f"/jobs/{ids['running']}?log=all")
    over = page(viewer, f"/jobs/{ids['failed']}")
    assert "data-events" not in over
    assert "noscript" not in over
    assert "mariadb-backup exited with status 1" in over


def test_a_restore_shows_each_of_its_phases_with_how_it_stands(viewer: httpx.Client, fleet: Rig) -> None:
    at = NOW - timedelta(minutes=9)
    job_id, restore_id = "20261121T025100Z-000000aa", "20261121T025100Z-000000ab"
    fleet.catalog.jobs.add(
        JobRecord(
            job_id,
            JobKind.RESTORE,
            SHOP,
            JobState.RUNNING,
            at,
            at,
            owner="elsewhere",
            token=1,
            arguments={"restore": restore_id},
        )
    )
    fleet.catalog.restores.start(
        RestoreRecord(
            restore_id,
            SHOP,
            "20261121T000000Z-00000001",
            "latest",
            "/srv/restored",
            JobState.RUNNING,
            at,
            phases=(Phase("fetched", 61.0, 1 << 30),),
            job_id=job_id,
        )
    )
    text = page(viewer, f"/jobs/{job_id}")
    assert re.search(r'phase-done"><span[^>]*>✓</span> <b>fetched</b> <span[^>]*>done, 1m 1s, 1.0 GiB', text)
    assert re.search(r"phase-waiting.*<b>rolled forward</b>", text)
    assert "/srv/restored" in text
    fleet.catalog.restores.keep_outcome(
        restore_id,
        {
            "datadir": "/srv/restored",
            "started": {"pid": 4711, "socket": "/srv/restored/mysqld.sock"},
            "checks": [{"name": EVIL, "outcome": "passed", "detail": ""}],
            "warnings": ["events are off"],
        },
    )
    done = page(viewer, f"/jobs/{job_id}")
    assert "runs as process 4711" in done
    assert "events are off" in done
    assert "<script>alert" not in done


def test_a_restore_leads_to_its_runbook_which_is_read_when_asked_for(viewer: httpx.Client, fleet: Rig) -> None:
    at = NOW - timedelta(minutes=9)
    job_id, restore_id = "20261121T025100Z-000000ca", "20261121T025100Z-000000cb"
    fleet.catalog.jobs.add(
        JobRecord(
            job_id,
            JobKind.RESTORE,
            SHOP,
            JobState.RUNNING,
            at,
            at,
            owner="elsewhere",
            token=1,
            arguments={"restore": restore_id},
        )
    )
    fleet.catalog.restores.start(
        RestoreRecord(
            restore_id, SHOP, "20261121T000000Z-00000001", "latest", f"/srv/{EVIL}", JobState.RUNNING, at, job_id=job_id
        )
    )
    text = page(viewer, f"/jobs/{job_id}")
    (address,) = re.findall(r'href="([^"]+)#runbook">Read the runbook of this restore<', text)
    book = page(viewer, address)
    assert not Document(book).troubles
    assert f"# Restore {restore_id} of {SHOP}" in book
    assert f"backupd restore {SHOP} --to latest" in book
    assert "could not be read" in book, "that of its backup, which nobody has"
    assert "<script>alert" not in book


def test_a_plan_out_of_an_archive_tells_hours_and_cost_of_each_tier_and_lists_no_objects(
    viewer: httpx.Client, ids: dict[str, str]
) -> None:
    text = page(viewer, f"/restore/plans/{ids['archived']}")
    assert not Document(text).troubles
    told = words(text)
    assert "3 objects, 72.0 GiB, of DEEP_ARCHIVE at vault cannot be read as they are; 1 of them is being thawed" in told
    assert "The restore is refused until they are thawed" in told
    assert "with at most 12 h for the thaw" in told
    tiers = re.findall(
        r'<th scope="row">(bulk|standard|expedited)</th><td data-label="At most" class="number">(\d+ h)'
        r'</td>\s*<td data-label="Cost" class="number">(\d+\.\d\d USD)</td>\s*'
        r'<td data-label="This plan">([^<]*)</td>',
        text,
    )
    assert [(tier, hours, here) for tier, hours, _cost, here in tiers] == [
        ("bulk", "48 h", ""),
        ("standard", "12 h", "used for the estimate"),
    ]
    assert 0 < float(tiers[0][2].split()[0]) < float(tiers[1][2].split()[0])
    assert re.search(r"Prices of \d{4}-\d\d-\d\d", told)
    assert "objects/" not in text


def test_alerts_show_what_is_open_and_mail_that_does_not_get_through(viewer: httpx.Client, fleet: Rig) -> None:
    calm = words(page(viewer, f"/alerts?server={SHOP}"))
    assert f"No incident is open for {SHOP}" in calm
    urgent = Incident(
        "20261121T020000Z-000000ba",
        "job-hanging",
        CRM,
        "",
        Severity.WARNING,
        "a job hangs",
        "",
        "look",
        NOW - timedelta(hours=1),
        NOW,
    )
    known = replace(
        urgent,
        id="20261121T020000Z-000000bb",
        severity=Severity.ERROR,
        message="known to all",
        acknowledged_by="anna",
        acknowledged_at=NOW,
    )
    letter = Message(
        "20261121T020000Z-000000bc",
        "email",
        MessageKind.ALERT,
        MessageState.QUEUED,
        "it hangs",
        ("dba@example.com",),
        "...",
        NOW,
        2,
        NOW + timedelta(minutes=3),
        None,
        "connection refused",
        incident_id=urgent.id,
    )
    fleet.catalog.incidents.record([urgent, known], [letter], {})
    text = words(page(viewer, "/alerts"))
    assert "1 message could not be delivered yet" in text
    assert "connection refused" in text
    assert "again in 3m" in text
    assert text.index("failed three times") < text.index("a job hangs") < text.index("known to all")
    assert "offsite was full" in text, "and what is over"


def test_who_may_see_some_servers_sees_nothing_of_the_others(fleet: Rig, ids: dict[str, str]) -> None:
    scoped = fleet.client(Role.VIEWER, servers=[CRM])
    scoped.headers["Accept"] = "text/html"
    for path in ("/", "/jobs", "/proofs", "/alerts"):
        text = page(scoped, path)
        assert SHOP not in text, path
        assert LEGACY not in text, path
    assert "it hangs" not in page(scoped, "/alerts"), "a message may be about any server"
    for path in (f"/servers/{SHOP}", f"/backups/{ids['shop']}", f"/jobs/{ids['running']}", f"/jobs?server={SHOP}"):
        assert scoped.get(path).status_code == 404, path
    assert page(scoped, f"/servers/{CRM}")


def test_who_has_not_logged_in_is_led_to_the_login_and_gets_style_and_icon_there(fleet: Rig) -> None:
    nobody = fleet.client()
    nobody.headers["Accept"] = "text/html"
    answer = nobody.get(f"/servers/{SHOP}?to=latest")
    assert (answer.status_code, answer.headers["location"]) == (303, f"/login?next=%2Fservers%2F{SHOP}%3Fto%3Dlatest")
    login = nobody.get("/login")
    assert login.status_code == 200
    assert 'aria-label="Pages"' not in login.text
    for address in re.findall(r'(?:href|src)="(/static/[^"]+)"', login.text):
        file = nobody.get(address)
        assert file.status_code == 200
        assert "immutable" in file.headers["cache-control"]
        assert nobody.get(address, headers={"If-None-Match": file.headers["etag"]}).status_code == 304
    assert nobody.get("/static/..%2Fsite.py").status_code == 404
    assert nobody.get("/static/site.py").status_code == 404
