"""What people ask for and do not wait for: it is queued or refused at once, and in the audit either way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from backupd.app.context.settings import load_settings
from backupd.app.context.wiring import Wiring, user
from backupd.app.restores.request import RestoreRequest
from backupd.app.service.facade import Service
from backupd.catalog.session import open_catalog
from backupd.model.access import Actor, Role, Via
from backupd.model.backup_record import EVERY_SERVER, BackupKind, HoldKind
from backupd.model.errors import (
    BackupdError,
    ConfigurationError,
    ForbiddenError,
    NotFoundError,
    RefusedError,
    UsageError,
)
from backupd.model.event import Event, Severity
from backupd.model.job import JobKind, JobState
from tests.support.catalog import samples
from tests.support.service.house import GOLD, Office

OPERATOR = Actor("ann", Role.OPERATOR, Via.API, address="10.0.0.7")
OF_DB1 = Actor("bob", Role.ADMIN, Via.PAGE, servers=frozenset({"db1"}))
LOGICAL = 'logical: {schedule: "0 4 * * *", sets: {money: {schedule: "every 1h", tables: {include: [a.b]}}}}\n'
TABLES = RestoreRequest("db1", "latest", mode="tables", tables=("a.b",), into="db2")


@pytest.fixture
def wiring(short_tmp: Path) -> Iterator[Wiring]:
    """``db3`` follows a policy that is broken."""
    office = Office(short_tmp, policies={"gold": GOLD + LOGICAL, "bad": "physical: ["})
    with suppress(ConfigurationError):
        office.write(
            servers={"db1": "gold", "db2": "gold", "db3": "bad"},
            extra=f"restore: {{gnupg_home: {short_tmp}, folders: [{short_tmp}/free], "
            f"scratch: {{path: {short_tmp}/scratch}}}}\n",
        )
    settings = load_settings(office.file, strict=False)
    with open_catalog(settings.catalog) as catalog:
        yield Wiring(settings, catalog)


@pytest.fixture
def service(wiring: Wiring) -> Service:
    return Service(wiring, "")


def told(wiring: Wiring) -> list[tuple[str, str, str, str]]:
    """What the audit has, oldest first."""
    return [(one.actor, one.action, one.server, one.outcome) for one in reversed(wiring.catalog.audit.list())]


def test_what_is_asked_for_waits_in_the_queue_under_the_name_of_who_asked(wiring: Wiring, service: Service) -> None:
    requests = service.acting(OPERATOR).requests
    jobs = [
        requests.backup("db1", BackupKind.LOGICAL, table_set="money"),
        requests.test_restore("db1", "random"),
        requests.verify("db1", 0.1),
        requests.verify(),
        requests.retention("db2", really=True),
        *requests.replicate("db1", "local"),
        *requests.replicate("db1"),
    ]
    assert {job.runs_on for job in jobs} == {wiring.here}, "nobody can ask for a job of another host"
    assert [(job.kind, job.server, job.arguments) for job in jobs] == [
        (JobKind.LOGICAL, "db1", {"set": "money"}),
        (JobKind.TEST_RESTORE, "db1", {"target": "random"}),
        (JobKind.VERIFY, "db1", {"subset": 0.1}),
        (JobKind.VERIFY, "", {}),
        (JobKind.RETENTION, "db2", {"really": True}),
        (JobKind.REPLICATE, "db1", {"destination": "local"}),
        (JobKind.REPLICATE, "db1", {"destination": "local"}),
    ]
    assert jobs[-1] == jobs[-2]  # one that waits is not asked for twice
    for job in jobs:
        row = wiring.catalog.jobs.get(job.id)
        assert (row.state, row.requested_by, row.leg) == (JobState.QUEUED, "ann", "")
    first = wiring.catalog.audit.list()[-1]
    assert (first.actor, first.role, first.via, first.address, first.action, first.subject) == (
        "ann",
        "operator",
        "api",
        "10.0.0.7",
        "backup-requested",
        jobs[0].id,
    )
    assert len(told(wiring)) == len(jobs)


@pytest.mark.parametrize(
    ("ask", "error"),
    [
        (lambda s: s.requests.backup("nix", BackupKind.PHYSICAL_FULL), NotFoundError),
        (lambda s: s.requests.backup("db3", BackupKind.PHYSICAL_FULL), ConfigurationError),
        (lambda s: s.requests.backup("db1", BackupKind.LOGICAL, table_set="nix"), NotFoundError),
        (lambda s: s.requests.backup("db1", BackupKind.LOGICAL, tables=("a.b.c",)), UsageError),
        (lambda s: s.requests.backup("db1", BackupKind.LOGICAL, tables=("a.b",), table_set="money"), UsageError),
        (lambda s: s.requests.backup("db1", BackupKind.PHYSICAL_FULL, tables=("a.b",)), UsageError),
        (lambda s: s.requests.test_restore("db1", "yesterday"), UsageError),
        (lambda s: s.requests.verify("db1", 1.5), UsageError),
        (lambda s: s.requests.verify("nix"), NotFoundError),
        (lambda s: s.requests.replicate("db1", "nix"), NotFoundError),
        (lambda s: s.requests.retention("db3"), ConfigurationError),
        (lambda s: s.requests.restore(TABLES), NotFoundError),
    ],
)
def test_what_could_not_be_done_is_refused_at_once_and_that_is_in_the_audit(
    wiring: Wiring, service: Service, ask: Callable[[Service], object], error: type[BackupdError]
) -> None:
    with pytest.raises(error):
        ask(service)
    assert wiring.catalog.jobs.list() == ()
    assert [entry[3] for entry in told(wiring)] == ["refused"]


def test_changes_by_the_service_are_in_the_audit_with_who_made_them(wiring: Wiring, service: Service) -> None:
    wiring.catalog.backups.add(samples.backup(server="db1"))
    name = samples.backup().id
    ann = service.acting(OPERATOR)
    job = ann.requests.verify("db1")
    ann.jobs.cancel(job.id)
    service.retention.hold("db1", "an audit")
    with pytest.raises(RefusedError, match="hold"):
        service.backups.delete(name)
    service.retention.release("db1", HoldKind.HOLD)
    service.retention.pause(EVERY_SERVER, "a move")
    service.retention.release(EVERY_SERVER, HoldKind.PAUSE)
    with pytest.raises(NotFoundError):
        service.backups.undelete("nix")
    me = user()
    assert told(wiring) == [
        ("ann", "verify-requested", "db1", "done"),
        ("ann", "job-cancelled", "db1", "done"),
        (me, "hold-set", "db1", "done"),
        (me, "backup-deleted", "db1", "refused"),
        (me, "hold-released", "db1", "done"),
        (me, "pause-set", "*", "done"),
        (me, "pause-released", "*", "done"),
        (me, "backup-undeleted", "", "refused"),
    ]
    assert wiring.catalog.jobs.get(job.id).cancel_by == "ann"


def test_servers_that_somebody_may_not_see_are_not_there(wiring: Wiring, service: Service) -> None:
    for number, server in enumerate(("db1", "db2", ""), 1):
        wiring.catalog.jobs.add(samples.job(number, server=server))
        wiring.catalog.events.add(Event(samples.NOON, "kind", Severity.INFO, "it happened", server=server))
    wiring.catalog.backups.add(samples.backup(1, server="db1"))
    wiring.catalog.backups.add(samples.backup(2, server="db2"))
    bob = service.acting(OF_DB1)
    other, ours = samples.backup(2).id, samples.backup(1).id
    assert bob.listings.servers() == ("db1",)
    assert [job.server for job in bob.listings.jobs().items] == [job.server for job in bob.jobs.list(None)] == ["db1"]
    assert [event.server for event in bob.listings.events().items] == ["db1"]
    assert [one.id for one in bob.listings.backups().items] == [one.id for one in bob.backups.each(None)] == [ours]
    assert [policy.name for policy in bob.listings.policies()] == ["gold"]
    assert bob.listings.policy("gold").servers == ("db1",)
    for look in (
        lambda: bob.jobs.get("job-2"),
        lambda: bob.jobs.get("job-3"),
        lambda: bob.jobs.cancel("job-2"),
        lambda: bob.jobs.log("job-2"),
        lambda: bob.backups.show(other),
        lambda: bob.backups.runbook(other),
        lambda: bob.backups.delete(other),
        lambda: bob.backups.keep(other, pinned=True),
        lambda: bob.backups.undelete(other),
        lambda: bob.listings.jobs("db2"),
        lambda: bob.listings.policy("bad"),
        lambda: bob.retention.hold("db2", "x"),
        lambda: bob.backups.each("db2"),
        lambda: bob.backups.list("db2"),
        lambda: bob.retention.preview("db2"),
        lambda: bob.servers.timeline("db2"),
        lambda: bob.restores.plan(RestoreRequest("db2", "latest")),
        lambda: bob.requests.backup("db2", BackupKind.PHYSICAL_FULL),
        lambda: bob.listings.server_is_present("db2"),
        lambda: bob.requests.plan(RestoreRequest("db2", "latest")),
    ):
        with pytest.raises(NotFoundError) as refused:
            look()
        assert "did you mean `db2`" not in str(refused.value)
    for look in (
        lambda: bob.retention.hold(EVERY_SERVER, "x"),
        bob.requests.verify,
        lambda: bob.retention.release(EVERY_SERVER, HoldKind.PAUSE),
    ):
        with pytest.raises(ForbiddenError):
            look()
    assert [job.server for job in bob.requests.replicate()] == ["db1"]
    service.retention.hold(EVERY_SERVER, "everybody")
    service.retention.hold("db2", "not bob's")
    assert [one.server for one in bob.retention.holds()] == [EVERY_SERVER]


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        ({"target": "latest"}, "server: is missing"),
        ({"server": "db1"}, "target: is missing"),
        ({"server": "db1", "target": "latest", "colour": "red"}, "colour: is not known"),
        ({"server": "db1", "target": "latest", "start": "yes"}, "start: has the wrong type"),
        ({"server": "db1", "target": "latest", "tables": "a.b"}, "tables: has the wrong type"),
        ({"server": "db1", "target": "tomorrow"}, "tomorrow"),
        ({"server": "db1", "target": "latest", "mode": "magic"}, "'magic' is not one of new-server"),
        ({"server": "db1", "target": "latest", "datadir": "srv/new"}, "must be an absolute path"),
        ({"server": "db1", "target": "latest", "datadir": "/srv/../etc"}, "must be an absolute path"),
        ({"server": "db1", "target": "latest", "tables": ["a.b"]}, "tables: only for tables"),
        ({"server": "db1", "target": "latest", "mode": "tables"}, "no tables given"),
        ({"server": "db1", "target": "latest", "mode": "tables", "tables": ["a.b.c"]}, "a.b.c"),
        ({"server": "db1", "target": "latest", "mode": "tables", "tables": ["a.b"], "datadir": "/x"}, "a whole server"),
        ({"server": "db1", "target": "latest", "exclude_gtid": ["x"]}, "GTID"),
    ],
)
def test_a_request_that_makes_no_sense_says_what_is_wrong_with_it(document: dict[str, object], problem: str) -> None:
    with pytest.raises(UsageError) as refused:
        RestoreRequest.from_json(document).check()
    assert problem in str(refused.value)


def test_a_request_is_the_same_after_it_was_kept() -> None:
    for request in (
        TABLES,
        RestoreRequest("db1", "latest", datadir="/srv/new", start=True, exclude=("0-1-2",)),
        RestoreRequest("db1", "latest", mode="tables", tables=("a.*",), sql="/srv/files", source="logical"),
    ):
        request.check()
        request.check_target_folder()
        assert RestoreRequest.from_json(request.as_json()) == request
    for nowhere, said in (
        (RestoreRequest("db1", "latest"), "no data directory given"),
        (RestoreRequest("db1", "latest", mode="tables", tables=("a.b",)), "no target given"),
    ):
        with pytest.raises(UsageError, match=said):
            nowhere.check_target_folder()


def test_policies_are_shown_with_who_follows_them_and_texts_are_validated(wiring: Wiring, service: Service) -> None:
    gold, bad = sorted(service.listings.policies(), key=lambda one: one.name, reverse=True)
    assert (gold.servers, gold.problems, gold.in_force, gold.text) == (("db1", "db2"), (), True, GOLD + LOGICAL)
    assert (bad.servers, bad.in_force, len(bad.problems) > 0) == (("db3",), False, True)
    (wiring.settings.configuration.policies / "gold.yaml").write_text(GOLD)
    assert not service.listings.policy("gold").in_force  # until it is loaded
    good = service.listings.validate_policy(GOLD)
    assert good.valid
    assert any("test_restore" in text for text in good.advice)
    wrong = service.listings.validate_policy(GOLD + "oops: 1\nretention: {nowhere: {daily: 0}}\n", "mine")
    assert not wrong.valid
    assert {(problem.file, problem.line) for problem in wrong.problems} == {("mine.yaml", 4), ("mine.yaml", 5)}
    bomb = "a: &a [x, x]\n" + "".join(
        f"{b}: &{b} [*{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}]\n"
        for a, b in zip("abcdefgh", "bcdefghi", strict=True)
    )
    for text in ("", "[1", "x" * 2_000_000, "a: !!python/object:os.system x\n", "\0", bomb, "\ud800"):
        assert not service.listings.validate_policy(text).valid
    with pytest.raises(UsageError):
        service.listings.validate_policy(GOLD, "../../etc/passwd")


@pytest.mark.parametrize("folder", ["{base}/free", "{base}/free/../taken", "{base}/taken/x", "{base}/link/x", "/"])
def test_an_operator_restores_only_beneath_the_folders_that_are_named(
    wiring: Wiring, service: Service, short_tmp: Path, folder: str
) -> None:
    (short_tmp / "free").mkdir()
    (short_tmp / "free" / "link").symlink_to("/etc")
    (short_tmp / "link").symlink_to(short_tmp / "taken")
    for where in (folder.format(base=short_tmp), str(short_tmp / "free" / "link" / "x")):
        request = RestoreRequest("db1", "latest", datadir=where)
        with pytest.raises((ForbiddenError, UsageError)) as refused:
            service.acting(OPERATOR).requests.restore(request)
        assert "folder" in str(refused.value) or "absolute" in str(refused.value)
    with pytest.raises(NotFoundError, match="backup"):  # there is nothing to restore; the folder was allowed
        service.acting(OPERATOR).requests.restore(RestoreRequest("db1", "latest", datadir=f"{short_tmp}/free/x"))
    assert wiring.catalog.restores.list() == ()


def test_a_folder_in_which_something_lies_is_refused_at_once(wiring: Wiring, service: Service, short_tmp: Path) -> None:
    (short_tmp / "taken").mkdir()
    (short_tmp / "taken" / "ibdata1").touch()
    for request in (
        RestoreRequest("db1", "latest", datadir=str(short_tmp / "taken")),
        RestoreRequest("db1", "latest", mode="tables", tables=("a.b",), sql=str(short_tmp / "taken")),
    ):
        with pytest.raises(RefusedError, match="not empty"):
            service.requests.restore(request)
    assert [entry[1::2] for entry in told(wiring)] == [("restore-requested", "refused")] * 2
