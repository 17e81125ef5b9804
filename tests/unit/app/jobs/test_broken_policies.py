"""A broken policy keeps from work what needs it, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from backupd.app.alerting.notifier import why_unwatched
from backupd.app.context.settings import Settings, held_settings, load_settings
from backupd.app.context.settings_problems import refuse_newly_broken
from backupd.app.context.wiring import Wiring
from backupd.app.jobs.admission import Admission, obstacle
from backupd.app.jobs.jobs import close
from backupd.app.service.facade import Service
from backupd.catalog.session import open_catalog
from backupd.model.backup_record import HoldKind
from backupd.model.errors import BackupdError, ConfigurationError
from backupd.model.event import Incident, Severity
from backupd.model.job import JobKind, JobState, silent
from tests.support.catalog import samples
from tests.support.catalog.configuration_files import CONFIGURATION, POLICY, write
from tests.support.service.house import GOLD, Office

BROKEN = GOLD + "oops: 1\n"


def test_a_broken_policy_that_no_server_follows_is_told_and_stops_nothing(tmp_path: Path) -> None:
    settings = Office(tmp_path).write(gold=GOLD, unused=BROKEN)
    assert list(settings.policies) == ["gold"]
    (problem,) = settings.unused()
    assert (Path(problem.file).name, problem.field) == ("unused.yaml", "oops")
    with Service.open(settings.file) as service:
        told = [finding for finding in service.servers.check(None) if "unused.yaml" in finding.message]
        assert [finding.severity for finding in told] == ["warning"]


@pytest.mark.parametrize("policies", [{"bad": BROKEN}, {"bad": "physical: ["}, {}])
def test_a_broken_policy_in_use_keeps_only_its_servers_from_what_needs_it(
    tmp_path: Path, policies: dict[str, str]
) -> None:
    office = Office(tmp_path, policies={"gold": GOLD, **policies})
    with pytest.raises(ConfigurationError):
        office.write(servers={"db1": "gold", "db2": "bad"})
    with pytest.raises(ConfigurationError):
        load_settings(office.file)
    with Service.open(office.file) as service:
        assert not list(service.jobs.list(None))
        assert service.backups.list("db2") == ()
        service.retention.hold("db2", "look at it")
        assert service.retention.pause("*", "a typo", stop_running=True).stopped == ()
        service.retention.release("*", HoldKind.PAUSE)
        with pytest.raises(ConfigurationError, match="bad"):
            service.foreground.verify("db2", None, silent)
        assert not list(service.jobs.list(None))
        service.foreground.verify("db1", None, silent)
        assert [
            (finding.subject, finding.hint.partition("; ")[2])
            for finding in service.servers.check(None)
            if finding.severity == "error" and "policy" in finding.subject
        ] == [("db2: policy", "other servers are not affected")]


def test_jobs_of_a_server_with_a_broken_policy_wait_until_it_is_whole_and_no_other_waits(tmp_path: Path) -> None:
    office = Office(tmp_path, {"db1": "gold", "db2": "bad"}, {"gold": GOLD, "bad": GOLD})
    whole = office.write()
    (tmp_path / "policies" / "bad.yaml").write_text(BROKEN)
    settings = load_settings(office.file, strict=False)
    running, killed, other = (
        replace(samples.job(number, server=server), state=state, leg="physical.full")
        for number, server, state in (
            (1, "db2", JobState.RUNNING),
            (2, "db2", JobState.RUNNING),
            (3, "db1", JobState.QUEUED),
        )
    )
    allowed = Admission(settings, ()).allows
    assert allowed(other, [running])
    assert not allowed(killed, [])
    assert obstacle(settings, (), killed, []) == "policy bad of db2 cannot be used: correct it, then reload the service"
    assert allowed(replace(killed, kind=str(JobKind.RESTORE), leg=""), [])
    with open_catalog(settings.catalog) as catalog:
        catalog.jobs.add(killed)
        close(Wiring(settings, catalog), killed, JobState.ABANDONED, error=BackupdError("it is gone"))
        (again,) = catalog.jobs.list(state=JobState.QUEUED)
        assert (again.previous, again.attempt) == (killed.id, killed.attempt + 1)
    folder = tmp_path / "held"
    folder.mkdir()
    held = held_settings(settings.hold(folder))
    assert held.broken == settings.broken
    with pytest.raises(ConfigurationError, match="1 problem"):
        refuse_newly_broken(whole, held)
    refuse_newly_broken(held, settings)


def test_a_broken_configuration_is_told_with_the_problems_of_all_policies(tmp_path: Path) -> None:
    path = write(tmp_path, CONFIGURATION + "nonsense: 1\n", gold=POLICY, other=POLICY + "oops: 1\n")
    with pytest.raises(ConfigurationError) as caught:
        load_settings(path, strict=False)
    assert {problem.field for problem in caught.value.problems} == {"nonsense", "oops"}


def test_settings_that_are_held_are_the_same_again_whatever_their_files_say(tmp_path: Path) -> None:
    text = CONFIGURATION.replace("path: /srv/backups", "path: here/backups")
    extra = "spool: s\nrestore: {gnupg_home: secret}\n"
    path = write(tmp_path, text + extra, gold=POLICY + "retry: {pause: 7m}\nlimits: {read: 5MiB}\n")
    settings = load_settings(path)
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    held = settings.hold(folder)
    path.write_text("servers: [")
    again = held_settings(held)
    assert isinstance(again, Settings)
    assert (again.file, again.configuration, again.policies) == (path, settings.configuration, settings.policies)
    assert again.spool == tmp_path / "s"
    held.write_text("{}")
    with pytest.raises(ConfigurationError, match="does not hold"):
        held_settings(held)


def test_servers_that_may_be_in_a_file_with_a_mistake_are_not_called_removed(tmp_path: Path) -> None:
    office = Office(tmp_path, {"db1": "gold"})
    office.write()
    folder = tmp_path / "servers.d"
    folder.mkdir()
    (folder / "a.yaml").write_text("db2: [\n")
    settings = load_settings(office.file, strict=False, whole=False)
    now = samples.NOON
    incident = Incident("i1", "stream-failed", "db2", "process", Severity.ERROR, "no", "", "", now, now)
    (folder / "a.yaml").unlink()
    with open_catalog(settings.catalog) as catalog:
        assert why_unwatched(Wiring(settings, catalog), incident) == ""
        removed = Wiring(load_settings(office.file), catalog)
        assert why_unwatched(removed, incident) == "db2 is no longer configured"
    job = samples.job(1, server="db2")
    assert "the file of servers with db2" in obstacle(settings, (), job, ())
    assert obstacle(removed.settings, (), job, ()) == ""
    assert obstacle(settings, (), samples.job(2, server="db1"), ()) == ""
    assert obstacle(settings, (), replace(job, kind=JobKind.RESTORE), ()) == ""
    assert [settings.is_unread(name) for name in ("", "db1", "db2")] == [False, False, True]
