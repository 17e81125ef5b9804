"""A catalog of 1,000 servers with 10^6 backups, on SQLite and on PostgreSQL: what it costs to read of one server, to
show all of them, to decide what a job of one server has to do, and to hand out jobs. Each row is measured in its own
process.

``python -m bench.fleet.catalog``. ``--keep DIR`` leaves the seeded catalogs there, and finds them there the next time;
``--servers 50 --backups 100`` is done in a minute. A process that takes more than ``--memory`` or ``--patience`` is
ended, and the row says so.

What a busy machine tells nothing of is done in ten minutes, once a quiet one is at hand: the commands, whose goal is
half a second from their start, and the hand-out of jobs, which is told in jobs a second:

    cp -a DIR COPY && python -m bench.fleet.catalog --keep COPY --only '^(cli|claim)'

The copy is of a catalog that was seeded before: a newer program upgrades what it opens.

CPU of the commands counts from their start, of everything else the work alone. ``database``: processor seconds of
PostgreSQL's own processes meanwhile. ``rows``: what was fetched from the catalog.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from backupd.model.text import format_size, parse_size
from bench.measure import peak_of

if TYPE_CHECKING:
    from backupd.app.context.wiring import Wiring
    from tests.support.catalog.fleet import Fleet

BACKUPD = Path(sys.executable).with_name("backupd")
ENGINES = ("sqlite", "postgresql")
POLICY = """\
physical: {{full: "0 2 * * *", incremental: "0 * * * *"}}
binlog: {{stream: true}}
destinations: {{required: [local], others: [offsite]}}
retention: {{local: {{recovery_window: {days}d}}, offsite: {{recovery_window: {days}d}}}}
test_restore: {{schedule: "0 6 * * *"}}
verify: {{schedule: "0 8 * * *", period: 28d}}
"""
LONG = 20.0
"""Seconds: what takes longer is done once."""
CLAIMING = 5.0
"""Seconds of handing out jobs."""
SETTLING = 60.0
"""Seconds that a service which has just begun may take until it rests."""


@dataclass(frozen=True, slots=True)
class Place:
    """A seeded catalog and its configuration in a folder."""

    base: Path
    engine: str

    @property
    def config(self) -> Path:
        return self.base / "backupd.yaml"

    @property
    def fleet(self) -> Fleet:
        from tests.support.catalog.fleet import Fleet

        found = json.loads((self.base / "fleet.json").read_text())
        return Fleet(**{**found, "now": datetime.fromisoformat(found["now"])})

    @property
    def asked(self) -> str:
        """The server of which one asks."""
        from tests.support.catalog.fleet import name_of

        return name_of(self.fleet.asked)

    def write(self, url: str, fleet: Fleet) -> None:
        (self.base / "policies").mkdir(exist_ok=True)
        (self.base / "policies" / "all.yaml").write_text(POLICY.format(days=fleet.backups // 24 + 3))
        servers = "".join(f"  {name}: {{socket: {self.base}/no.sock, policy: all}}\n" for name in fleet.names)
        self.config.write_text(
            f"catalog: {url}\nspool: {self.base}/spool\npolicies: {self.base}/policies\nservers:\n{servers}"
            f"destinations:\n  local: {{type: filesystem, path: {self.base}/local}}\n"
            f"  offsite: {{type: filesystem, path: {self.base}/offsite, off_site: true}}\n"
            f"encryption: {{gnupg_home: {self.base}/gnupg, recipients: [ops@example.com]}}\n"
            "api: {enabled: false}\n"
        )

    def seed(self, url: str, fleet: Fleet) -> None:
        """Where it is not seeded yet; else the configuration alone is written, for where the folder is now."""
        if (self.base / "fleet.json").exists():
            self.write(url, self.fleet)
            return
        from backupd.app.context.access import command_line, create_token
        from backupd.app.context.settings import load_settings
        from backupd.app.context.wiring import Wiring
        from backupd.app.schedule.timetable import Timetable
        from backupd.catalog.session import open_catalog
        from backupd.model.access import Role
        from tests.support.catalog.bulk import fill, lay

        begun = time.perf_counter()
        self.write(url, fleet)
        count = sum(fill(url, fleet).values())
        print(f"{self.engine}: {count:,} rows in {time.perf_counter() - begun:.0f} s", file=sys.stderr, flush=True)
        settings = load_settings(self.config)
        with open_catalog(settings.catalog) as catalog:
            wiring = Wiring(settings, catalog)
            Timetable(catalog).follow(settings, datetime.now(UTC))
            for name in settings.destinations:
                destination = wiring.destination(name)
                destination.initialise(fleet.now)
                lay(fleet, destination)
            _token, secret = create_token(wiring, command_line(), "bench", Role.ADMIN)
        (self.base / "token").write_text(secret)
        (self.base / "fleet.json").write_text(json.dumps({**asdict(fleet), "now": fleet.now.isoformat()}))


@contextmanager
def opened(base: Path, engine: str, fleet: Fleet) -> Iterator[Place]:
    """The seeded catalog in ``base``, its database at work until the block ends."""
    base.mkdir(parents=True, exist_ok=True)
    base.chmod(0o755)
    place = Place(base, engine)
    if engine == "sqlite":
        place.seed(f"sqlite:///{base}/catalog.db", fleet)
        yield place
        return
    from tests.support.catalog.postgresql import PostgreSQL, own_folder

    folder = base / "server"
    server = PostgreSQL(folder, port=5432)
    known = (folder / "data").exists()
    if not known:
        own_folder(folder)
        server.initialise()
    server.start()
    try:
        if not known:
            server.create("catalog")
        place.seed(server.url("catalog"), fleet)
        yield place
    finally:
        server.stop("fast")


# -- what is measured, each in a process of its own

Work = Callable[[], str]
"""Gives what is to be remarked."""


def _wiring(place: Place) -> Wiring:
    from backupd.app.context.settings import load_settings
    from backupd.app.context.wiring import Wiring
    from backupd.catalog.session import open_catalog

    settings = load_settings(place.config)
    return Wiring(settings, open_catalog(settings.catalog))


def _configuration(place: Place) -> Work:
    from backupd.app.context.settings import load_settings

    return lambda: f"{len(load_settings(place.config).servers):,} servers"


def _retention(place: Place) -> Work:
    from backupd.app.retention.preview import preview

    wiring = _wiring(place)

    def work() -> str:
        found = preview(wiring, place.asked, now=wiring.clock())
        return ", ".join(f"{one.destination}: {len(one.kept):,} of {len(one.backups):,} kept" for one in found)

    return work


def _replicate(place: Place) -> Work:
    from backupd.app.context.wiring import JobRun
    from backupd.app.copies.replication import bring_up_to_date
    from backupd.model.job import JobKind, JobRecord, JobState

    wiring = _wiring(place)
    job = JobRecord("20261121T040000Z-00000000", JobKind.REPLICATE, place.asked, JobState.RUNNING, wiring.clock())

    def work() -> str:
        done = bring_up_to_date(wiring, place.asked, "offsite", JobRun(job), pauses=())
        return f"{len(done.copied)} copied, {len(done.lost)} lost, " + ("well" if done.ok else str(done.trouble)[:100])

    return work


def _verify(place: Place) -> Work:
    from backupd.app.verify.missing_tables import look_back
    from backupd.app.verify.scrubbing import Rotation, due

    wiring = _wiring(place)

    def work() -> str:
        now = wiring.clock()
        shares = [
            len(due(wiring.catalog.scrubs.done(place.asked, name), Rotation(subset=0.1), now))
            for name in wiring.settings.destinations
        ]
        return f"{shares} shares are due, {len(look_back(wiring, place.asked))} backups lack tables"

    return work


def _sweep(place: Place) -> Work:
    from backupd.app.retention.deletion import sweep_destination

    wiring = _wiring(place)
    return lambda: f"{len(sweep_destination(wiring, wiring.destination('local')))} held back"


def _rest(path: str) -> Callable[[Place], Work]:
    """Asked of the application itself, without a socket. The first answer, with which modules are imported and rows
    that are behind are made anew, is told beside the row; the row is a later one, asked when the threads of a service
    that has just begun have nothing left to do."""

    def prepare(place: Place) -> Work:
        import httpx

        from api.server import create_app
        from backupd.app.service.facade import Service

        wiring = _wiring(place)
        app = create_app(Service(wiring, ""), wiring, reload=lambda: None)
        secret = (place.base / "token").read_text()
        address, cookies = path.replace("SERVER", place.asked), httpx.Cookies()
        page = address == "/"
        headers = {"Accept": "text/html"} if page else {"Authorization": f"Bearer {secret}"}

        async def ask(*, first: bool = False) -> httpx.Response:
            async with httpx.AsyncClient(
                transport=httpx.ASGITransport(app=app, client=("127.0.0.1", 40000)),
                base_url="http://127.0.0.1",
                timeout=None,
                cookies=cookies,
                headers=headers,
            ) as http:
                if page and first:  # somebody comes in
                    await http.post("/login", data={"token": secret, "next": "/"})
                    cookies.update(http.cookies)
                return await http.get(address)

        begun, cpu = time.perf_counter(), time.process_time()
        asyncio.run(ask(first=True))
        told = f"the first: {time.perf_counter() - begun:.2f} s, CPU {time.process_time() - cpu:.2f} s"
        _settle()

        def work() -> str:
            answer = asyncio.run(ask())
            return f"{answer.status_code}, {format_size(len(answer.content))}; {told}"

        return work

    return prepare


def _settle() -> None:
    """Until the other threads of this process rest: less than 1 % of a second."""
    until = time.perf_counter() + SETTLING
    while time.perf_counter() < until:
        cpu = time.process_time()
        time.sleep(1)
        if time.process_time() - cpu < 0.01:
            return


def _claim(waiting: int) -> Callable[[Place], Work]:
    """One claimer, with so many jobs in the queue. They are taken out again."""

    def prepare(place: Place) -> Work:
        from sqlalchemy import delete

        from backupd.app.context.settings import load_settings
        from backupd.catalog.database import Database
        from backupd.catalog.jobs import insert_jobs
        from backupd.catalog.session import open_catalog
        from backupd.catalog.tables.jobs import jobs
        from backupd.model.job import JobRecord, JobState

        url = load_settings(place.config).catalog
        names, now = place.fleet.names, datetime.now(UTC)
        database = Database(url)

        def clear() -> None:
            with database.write() as connection:
                connection.execute(delete(jobs).where(jobs.c.requested_by == "bench"))

        clear()
        with database.write() as connection:
            insert_jobs(
                connection,
                [
                    JobRecord(
                        f"{now:%Y%m%dT%H%M%SZ}-{number:08x}",
                        "physical-incremental",
                        names[number % len(names)],
                        JobState.QUEUED,
                        now,
                        requested_by="bench",
                    )
                    for number in range(waiting)
                ],
            )

        def work() -> str:
            done, begun = 0, time.perf_counter()
            cpu = time.process_time()
            try:
                with open_catalog(url) as catalog:
                    while done < waiting and time.perf_counter() - begun < CLAIMING:
                        job = catalog.jobs.claim("bench", datetime.now(UTC))
                        if job is None:
                            break
                        catalog.jobs.finish(job.id, JobState.SUCCEEDED, datetime.now(UTC), token=job.token)
                        done += 1
                seconds = time.perf_counter() - begun
                each = (time.process_time() - cpu) / max(done, 1)
                return f"**{done / seconds:.0f}/s**, {each * 1000:.1f} ms CPU each"
            finally:
                clear()

        return work

    return prepare


ONE_READ, DECISION, PAGE = (0.5, 150), (None, 200), (2.0, None)
"""Goals: CPU seconds and MiB. A page comes within a second, too, where nothing else runs."""
CLI: Mapping[str, tuple[str, ...]] = {
    "cli backups": ("backups", "SERVER", "--json"),
    "cli timeline": ("timeline", "SERVER", "--json"),
    "cli plan": ("plan", "SERVER", "--to", "latest", "--accept-older", "--json"),
    "cli retention": ("retention", "SERVER", "--json"),
    "cli jobs": ("jobs", "list", "SERVER", "--json"),
}
WORK: Mapping[str, tuple[Callable[[Place], Work], tuple[float | None, int | None]]] = {
    "read the configuration": (_configuration, (None, None)),
    "GET /v1/servers?limit=100": (_rest("/v1/servers?limit=100"), PAGE),
    "GET /v1/servers/SERVER": (_rest("/v1/servers/SERVER"), ONE_READ),
    "GET /v1/servers/SERVER/timeline": (_rest("/v1/servers/SERVER/timeline"), ONE_READ),
    "GET /v1/backups": (_rest("/v1/backups"), ONE_READ),
    "GET /v1/backups?server=SERVER": (_rest("/v1/backups?server=SERVER&limit=100"), ONE_READ),
    "GET /v1/jobs?server=SERVER": (_rest("/v1/jobs?server=SERVER"), ONE_READ),
    "page: overview": (_rest("/"), PAGE),
    "GET /metrics": (_rest("/metrics"), PAGE),
    "retention of one server": (_retention, DECISION),
    "replicate of one server": (_replicate, DECISION),
    "verify of one server, what is due": (_verify, DECISION),
    "sweep of one destination": (_sweep, DECISION),
    **{f"claim + finish, {count:,} waiting": (_claim(count), (None, None)) for count in (100, 1_000, 10_000)},
}


@dataclass(frozen=True, slots=True)
class Measured:
    """``rows``: None where they were not counted; ``ended``: why it was."""

    wall: float
    cpu: float
    peak: int
    database: float | None = None
    rows: int | None = None
    note: str = ""
    ended: bool = False


def measure(name: str, place: Place) -> Measured:
    """In this process."""
    from tests.support.catalog.rows import counted

    work = WORK[name][0](place)
    before = _database_cpu(place)
    cpu, begun = time.process_time(), time.perf_counter()
    ended = False
    with counted() as fetched:
        try:
            note = work()
        except Exception as error:  # noqa: BLE001  whatever it is, it stands in the row
            note, ended = " ".join(f"{type(error).__name__}: {error}".split())[:160], True
    return Measured(
        time.perf_counter() - begun,
        time.process_time() - cpu,
        peak_of(os.getpid()),
        None if before is None else (_database_cpu(place) or before) - before,
        rows=fetched.rows,
        note=note,
        ended=ended,
    )


def watched(argv: Sequence[str], *, memory: int, patience: float) -> tuple[Measured, str]:
    """Run ``argv`` until its end, or until it takes too much; gives what it wrote, too."""
    before, begun, peak, why = os.times(), time.perf_counter(), 0, ""
    with (
        tempfile.TemporaryFile() as out,
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(argv, stdout=out, stderr=errors) as process,
    ):
        while process.poll() is None:
            peak = max(peak, peak_of(process.pid))
            if peak > memory:
                why = f"ended: more than {format_size(memory)}"
            elif time.perf_counter() - begun > patience:
                why = f"ended: longer than {patience:.0f} s"
            if why:
                process.kill()
                process.wait()
            time.sleep(0.02)
        wall = time.perf_counter() - begun
        out.seek(0)
        errors.seek(0)
        written, told = out.read().decode(), errors.read().decode(errors="replace")
    after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    if process.returncode and not why:
        why = " ".join(told.split())[-200:]
    return Measured(wall, cpu, peak, note=why or format_size(len(written)), ended=bool(why)), written


def one(name: str, place: Place, *, memory: int, patience: float) -> Measured:
    """In a process of its own."""
    if name in CLI:
        before = _database_cpu(place)
        words = [word.replace("SERVER", place.asked) for word in CLI[name]]
        found, _written = watched(
            [str(BACKUPD), "--config", str(place.config), *words], memory=memory, patience=patience
        )
        after = _database_cpu(place)
        return found if before is None or after is None else replace(found, database=after - before)
    argv = [sys.executable, "-m", "bench.fleet.catalog", "--measure", name, "--in", str(place.base)]
    found, written = watched([*argv, "--on", place.engine], memory=memory, patience=patience)
    return found if found.ended else Measured(**json.loads(written.splitlines()[-1]))


def _database_cpu(place: Place) -> float | None:
    """Processor seconds of the server's processes, those that are over included."""
    if place.engine == "sqlite":
        return None
    postmaster = (place.base / "server" / "data" / "postmaster.pid").read_text().split()[0]
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if stat.parent.name == postmaster:
                ticks += sum(map(int, fields[11:15]))
            elif fields[1] == postmaster:
                ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def row(name: str, runs: Sequence[Measured], goal: tuple[float | None, int | None]) -> str:
    """Medians; the peak is the highest."""
    cpu, peak, last = statistics.median(one.cpu for one in runs), max(one.peak for one in runs), runs[-1]
    seconds, size = goal
    told = [*([f"{seconds:g} s"] if seconds else []), *([f"{size} MiB"] if size else [])]
    met = not last.ended and cpu <= (seconds or cpu) and (size is None or peak <= size << 20)
    database = [one.database for one in runs if one.database is not None]
    cells = [
        name,
        f"{statistics.median(one.wall for one in runs):.2f} s",
        f"{cpu:.2f} s",
        f"{statistics.median(database):.2f} s" if database else "-",
        format_size(peak),
        f"{last.rows:,}" if last.rows is not None else "-",
        "≤ " + ", ".join(told) if told else "",
        ("yes" if met else "NO") if told else "",
        last.note.replace("|", "/"),
    ]
    return f"| {' | '.join(cells)} |"


def table(place: Place, *, only: str, rounds: int, memory: int, patience: float) -> str:
    fleet = place.fleet
    subject = (
        f"{place.engine}: {fleet.servers:,} servers, {fleet.servers * fleet.backups:,} backups, "
        f"{fleet.servers * fleet.segments:,} segments, {fleet.servers * fleet.jobs:,} jobs"
    )
    lines = [
        f"| {subject} | wall | CPU | database | memory | rows | goal | met | |",
        "|---|---:|---:|---:|---:|---:|---|---|---|",
    ]
    goals = {**dict.fromkeys(CLI, ONE_READ), **{name: goal for name, (_work, goal) in WORK.items()}}
    for name, goal in goals.items():
        if re.search(only, name):
            runs = [one(name, place, memory=memory, patience=patience)]
            while len(runs) < rounds and runs[0].wall < LONG and not runs[0].ended:
                runs.append(one(name, place, memory=memory, patience=patience))
            lines.append(row(name, runs, goal))
            print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join([*lines, "", f"Load when it ended: {os.getloadavg()[0]:.1f}."])


def main(argv: Sequence[str] | None = None) -> str:
    """The tables as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", type=int, default=1_000)
    parser.add_argument("--backups", type=int, default=1_000, help="of each server")
    parser.add_argument("--segments", type=int, help="of each server; as many as backups")
    parser.add_argument("--on", choices=(*ENGINES, "both"), default="both")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="seeded catalogs stay, and are found there again")
    parser.add_argument("--only", default="", metavar="REGEX", help="rows to measure; `^$` seeds alone")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory", type=parse_size, default=parse_size("6GiB"))
    parser.add_argument("--patience", type=float, default=300.0, help="seconds")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--in", type=Path, dest="place", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.measure:
        with redirect_stdout(io.StringIO()):
            found = measure(options.measure, Place(options.place, options.on))
        return json.dumps(asdict(found))
    from tests.support.catalog.fleet import Fleet

    fleet = Fleet(
        datetime.now(UTC).replace(microsecond=0),
        options.servers,
        options.backups,
        options.segments or options.backups,
        asked=options.servers // 2 + 1 if options.servers > 2 else 0,
    )
    base = options.keep or Path(tempfile.mkdtemp(prefix="bench-catalog-", dir="/tmp"))
    base.mkdir(parents=True, exist_ok=True)
    base.chmod(0o755)
    try:
        tables = []
        for engine in ENGINES if options.on == "both" else (options.on,):
            with opened(base.absolute() / engine, engine, fleet) as place:
                tables.append(
                    table(
                        place,
                        only=options.only,
                        rounds=options.rounds,
                        memory=options.memory,
                        patience=options.patience,
                    )
                )
        return "\n\n".join(tables)
    finally:
        if not options.keep:
            shutil.rmtree(base, ignore_errors=True)


if __name__ == "__main__":
    print(main())
