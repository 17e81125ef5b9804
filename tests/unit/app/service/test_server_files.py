"""The real service process and the files of servers in servers.d: missing, broken, mended, moved."""

from __future__ import annotations

import signal
from functools import partial
from pathlib import Path

import pytest

from backupd.alerts.conditions import Key
from backupd.alerts.rules import STREAM
from backupd.app.context.settings import load_settings
from backupd.app.context.wiring import Wiring
from backupd.app.jobs.jobs import queued
from backupd.model.event import Severity
from backupd.model.job import JobKind, JobState
from tests.support.service.daemon import FAR, is_begun, looking, serving, until
from tests.support.service.house import Office


@pytest.fixture
def office(short_tmp: Path) -> Office:
    office = Office(short_tmp, policies={"gold": FAR})
    office.write()
    return office


def test_a_file_of_servers_with_a_mistake_keeps_only_its_servers_from_being_served(office: Office) -> None:
    folder = office.base / "servers.d"
    folder.mkdir()
    (folder / "a.yaml").write_text("db2: {policy: gold, socket: no.sock}\n")
    bad = folder / "b.yaml"
    bad.write_text("db3: {policy: gold, socket: no.sock, nonsense: 1}\n")
    with serving(office) as service:
        service.ready()
        assert f"without the servers of {bad}" in service.refused()
        with looking(office) as catalog:
            assert {server for server, _leg in catalog.schedules.all()} == {"", "db1", "db2"}
            until(lambda: [one.kind for one in catalog.incidents.list(is_open=True)] == ["config-refused"], "told")
            (event,) = catalog.events.list(kind="config-refused")
            assert "nonsense" in event.detail
            service.process.send_signal(signal.SIGHUP)
            service.ready(2)
            assert "was not reloaded" in catalog.events.list(kind="config-refused")[0].message, "it stays refused"
            bad.write_text("db3: {policy: gold, socket: no.sock}\n")
            service.process.send_signal(signal.SIGHUP)
            service.ready(3)
            assert {server for server, _leg in catalog.schedules.all()} == {"", "db1", "db2", "db3"}
            until(lambda: catalog.incidents.list(is_open=True) == (), "closed")


def test_servers_whose_folder_is_empty_at_the_start_are_told(office: Office) -> None:
    folder = office.base / "servers.d"
    folder.mkdir()
    (folder / "a.yaml").write_text("db2: {policy: gold, socket: no.sock}\n")
    with serving(office) as service:
        service.ready()
    file = (folder / "a.yaml").rename(office.base / "a.yaml")  # as before it is mounted
    with serving(office) as service:
        service.ready()
        assert f"db2, which the service backed up before, are not configured any more, and {folder} holds" in (
            service.refused()
        )
        file.rename(folder / "a.yaml")
        service.process.send_signal(signal.SIGHUP)
        service.ready(2)
        with looking(office) as catalog:
            until(lambda: catalog.incidents.list(is_open=True) == (), "closed")


@pytest.mark.parametrize("mistake", ["db3: [", None])
def test_servers_that_could_not_be_read_at_the_start_are_not_taken_for_removed(
    office: Office, mistake: str | None
) -> None:
    """With a mistake in their file, or with a folder that is not mounted yet: at the second start like that, too."""
    file = office.base / "servers.d" / "b.yaml"
    file.parent.mkdir()
    file.write_text("db3: {policy: gold, socket: no.sock}\n")
    whole = load_settings(office.file)
    with serving(office) as service, looking(office) as catalog:
        service.ready()
        rows = {key: row.cadence for key, row in catalog.schedules.all().items()}
        wiring = Wiring(whole, catalog)
        wiring.alert(Key(STREAM, "db3", "process"), Severity.ERROR, "the binary log of db3 is not streamed")
        until(lambda: len(catalog.incidents.list(is_open=True)) == 1, "opened")
    with looking(office) as catalog:
        job = queued(Wiring(whole, catalog), JobKind.VERIFY, "db3")
        catalog.jobs.add(job)
    if mistake is None:
        file.unlink()
    else:
        file.write_text(mistake)
    for _start in range(2):
        with serving(office) as service, looking(office) as catalog:
            service.ready()
            assert "db3" in service.refused()
            younger = queued(Wiring(whole, catalog), JobKind.VERIFY, "db1")
            catalog.jobs.add(younger)
            until(partial(is_begun, catalog, younger), "the queue goes on")
            assert catalog.jobs.get(job.id).state is JobState.QUEUED
            assert {key: row.cadence for key, row in catalog.schedules.all().items()} == rows
            assert catalog.events.list(kind="schedule-ended") == ()
    file.write_text("db3: {policy: gold, socket: no.sock}\n")
    with serving(office) as service, looking(office) as catalog:
        service.ready()
        until(
            lambda: catalog.incidents.list([""], is_open=True) == (),
            "a start that reads every file ends it as a reload does",
        )
        assert "stream-failed" in [one.kind for one in catalog.incidents.list(is_open=True)]
        until(partial(is_begun, catalog, job), "it waits no more")


def test_a_reload_follows_the_files_of_servers(office: Office) -> None:
    folder = office.base / "servers.d"
    folder.mkdir()
    (folder / "a.yaml").write_text("db2: {policy: gold, socket: no.sock}\ndb3: {policy: gold, socket: no.sock}\n")
    with serving(office) as service:
        service.ready()
        assert service.heard("STATUS=3 servers")
        (folder / "b.yaml").write_text("db3: {policy: gold}\ndb4: {policy: gold}\n")
        (folder / "c.yaml").symlink_to("/etc/passwd")
        service.process.send_signal(signal.SIGHUP)
        service.ready(2)
        refused = service.refused()
        assert f"server `db3` is in {folder / 'a.yaml'}, line 2, too" in refused
        assert "'c.yaml' is a link to '/etc/passwd'" in refused
        (folder / "a.yaml").write_text("db2: {policy: gold, socket: no.sock}\n")
        (folder / "c.yaml").unlink()
        service.process.send_signal(signal.SIGHUP)
        service.ready(3)
        with looking(office) as catalog:
            (told,) = catalog.events.list(kind="config-reloaded")
            assert "4 servers; new: db4" in told.message
            assert ("db4", "physical.full") in catalog.schedules.all()
        folder.rename(office.base / "elsewhere")  # or it is not mounted
        service.process.send_signal(signal.SIGHUP)
        service.ready(4)
        lost = f"there is no file of servers in {folder} any more: db2, db3, db4 would not be backed up"
        assert lost in service.refused()
        office.write(servers=dict.fromkeys(("db1", "db2", "db3", "db4"), "gold"))
        service.process.send_signal(signal.SIGHUP)
        service.ready(5)
        with looking(office) as catalog:
            assert "4 servers" in catalog.events.list(kind="config-reloaded")[0].message, "they are in another file"
