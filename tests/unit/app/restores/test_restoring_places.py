"""Where restores that are asked for may go, what is told of what lies there, and whether it is still that place when
they begin."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from backupd.app.context.wiring import JobRun, Wiring
from backupd.app.restores.allowed_folders import refuse_shared, with_real_paths
from backupd.app.restores.jobs import perform_restore
from backupd.app.restores.request import RestoreRequest
from backupd.app.service.facade import Service
from backupd.catalog.session import open_catalog
from backupd.model.access import Actor, Role, Via
from backupd.model.errors import BusyError, NotFoundError, RefusedError
from backupd.model.job import JobRecord, JobState
from restore.datadir.staging import State, choose_site, write_state
from tests.support.catalog import samples
from tests.support.service.house import Office

OF_DB1 = Actor("bob", Role.ADMIN, Via.API, servers=frozenset({"db1"}))
OTHER = State("r", "db2", "latest", ("20261121T020000Z-7f3a9c01",))
SQL = RestoreRequest("db1", "latest", mode="tables", tables=("a.b",))


@pytest.fixture
def wiring(tmp_path: Path) -> Iterator[Wiring]:
    settings = Office(tmp_path).write(
        servers={"db1": "gold", "db2": "gold"},
        extra=f"restore: {{gnupg_home: {tmp_path}, scratch: {{path: {tmp_path}/scratch}}}}\n",
    )
    with open_catalog(settings.catalog) as catalog:
        yield Wiring(settings, catalog)


def refusal(wiring: Wiring, request: RestoreRequest, actor: Actor | None = None) -> str:
    service = Service(wiring, "")
    with pytest.raises((RefusedError, NotFoundError)) as told:
        (service.acting(actor) if actor else service).requests.restore(request)
    return str(told.value)


@pytest.mark.parametrize("folder", ["data/newschema", "link/newschema", "repo/objects/zz", "one.restoring/inner"])
def test_tables_as_files_are_refused_where_a_data_directory_would_be(
    wiring: Wiring, tmp_path: Path, folder: str
) -> None:
    for name, sign in (("data", "ibdata1"), ("repo", "repository.json")):
        (tmp_path / name).mkdir()
        (tmp_path / name / sign).touch()
    (tmp_path / "link").symlink_to(tmp_path / "data")
    for request in (
        replace(SQL, sql=str(tmp_path / folder)),
        RestoreRequest("db1", "latest", datadir=str(tmp_path / folder)),
    ):
        assert " lies " in refusal(wiring, request)


def test_who_sees_some_servers_is_told_only_how_much_lies_in_a_folder(wiring: Wiring, tmp_path: Path) -> None:
    (tmp_path / "taken" / "payroll").mkdir(parents=True)
    request = RestoreRequest("db1", "latest", datadir=str(tmp_path / "taken"))
    assert "payroll" in refusal(wiring, request)
    for wanted in (request, replace(SQL, sql=str(tmp_path / "taken"))):
        said = refusal(wiring, wanted, OF_DB1)
        assert "1 entries" in said
        assert "payroll" not in said


def test_another_servers_unfinished_restore_is_refused_at_once_and_not_named(wiring: Wiring, short_tmp: Path) -> None:
    site = choose_site(short_tmp / "one")
    site.folder.mkdir()
    write_state(site, OTHER)
    request = RestoreRequest("db1", "latest", datadir=str(short_tmp / "one"))
    said = refusal(wiring, request, OF_DB1)
    assert "of another server" in said
    assert "db2" not in said
    assert OTHER.chain[0] not in said
    assert OTHER.chain[0] in refusal(wiring, request)
    with pytest.raises(NotFoundError, match="no backup"):  # it is no obstacle for its own server
        Service(wiring, "").requests.restore(replace(request, server="db2"))


def test_a_restore_of_another_server_that_goes_there_is_in_the_way(wiring: Wiring) -> None:
    row = replace(samples.restore(), server="db2")
    wiring.catalog.restores.start(row)
    with pytest.raises(BusyError, match="another restore into") as told:
        refuse_shared(wiring, RestoreRequest("db1", "latest", datadir=row.datadir))
    assert row.id not in str(told.value)
    refuse_shared(wiring, RestoreRequest("db2", "latest", datadir=row.datadir))
    refuse_shared(wiring, RestoreRequest("db1", "latest", datadir=f"{row.datadir}2"))


@pytest.mark.parametrize("name", ["db2", "nowhere"])
def test_a_server_that_is_not_there_for_somebody_is_no_more_told_of_than_one_that_is_nowhere(
    wiring: Wiring, name: str
) -> None:
    for request in (replace(SQL, into=name, compare=True), RestoreRequest(name, "latest", datadir="/nowhere/x")):
        assert refusal(wiring, request, OF_DB1) == f"there is no server {name!r}"


def test_one_folder_has_one_name(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for text in ("{}/real/x", "/{}/real/./x/", "{}//real/x", "{}/link/x"):
        found = with_real_paths(RestoreRequest("db1", "latest", datadir=text.format(tmp_path)))
        assert (found.datadir, found.sql) == (str(tmp_path / "real" / "x"), "")


@pytest.mark.parametrize("kind", ["datadir", "sql"])
def test_a_folder_that_became_another_one_since_it_was_allowed_is_refused_by_the_job(
    wiring: Wiring, tmp_path: Path, kind: str
) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "a").mkdir()
    where = {kind: str(tmp_path / "a" / "x")}
    request = with_real_paths(
        replace(SQL, sql=where["sql"]) if kind == "sql" else RestoreRequest("db1", "latest", datadir=where["datadir"])
    )
    job = JobRecord("job-1", "restore", "db1", JobState.QUEUED, samples.NOON, arguments={"restore": "restore-1"})
    row = replace(
        samples.restore(),
        server="db1",
        state=JobState.QUEUED,
        job_id=job.id,
        request={"request": request.as_json(), "promise": {"until": None}},
    )
    wiring.catalog.restores.queue(row, job)
    (tmp_path / "a").rmdir()
    (tmp_path / "a").symlink_to(tmp_path / "outside")
    with pytest.raises(RefusedError, match="no longer the folder") as told:
        perform_restore(wiring, JobRun(job))
    assert str(tmp_path / "outside" / "x") in told.value.detail
    (tmp_path / "a").unlink()
    (tmp_path / "a" / "x" / "payroll").mkdir(parents=True)
    with pytest.raises(RefusedError, match="not empty: 1 entries") as told:
        perform_restore(wiring, JobRun(job))
    assert "payroll" not in str(told.value)
