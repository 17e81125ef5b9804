"""The main job from end to end, on a database server of its own.

Starts a private MariaDB with sample data, takes a full backup and an increment, damages the server, restores the chain
onto a fresh one, shows that what was lost is back, backs up again to show what is shared, and proves the newest backup
by a test restore. Then the service works by itself: it takes a backup and follows the binary log while orders come in.
Somebody deletes all orders; the statement is found in the archived log, and the server is restored to right before it,
by the command line and by the REST interface; a backup fails, and a mail tells of it.
At last everything burns down but a bucket of a real S3 server: from there and the private key alone it comes back.
Whatever was started is stopped and removed at the end. The last line
on stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import shutil
import signal
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from others import others_come_in
from postbox import Postbox
from scenery import SERVER, WRITER, a_bucket, configuration_elsewhere, sign_with, write_configuration
from stage import CommandLine, DemoFailedError, expect, say, service, step, stopped_at_the_end, until

from backupd.model.text import format_time
from tests.support import sample
from tests.support.keys import Keys, operator_keys
from tests.support.servers.mariadb import SERVICE_PASSWORD, PrivateServer, connect, query
from tests.support.service.serving import free_port
from tests.support.stores.folders import short_directory

MEBIBYTE = 2**20
CHANGES = (
    "UPDATE shop.orders SET note = CONCAT('checked ', id) WHERE id % 50 = 0",
    "CREATE TABLE shop.returns (id INT PRIMARY KEY, reason VARCHAR(100))",
    "INSERT INTO shop.returns SELECT seq, CONCAT('reason ', seq) FROM shop.seq_1_to_5000",
)


def increment_of_the_service(backupd: CommandLine, known: str) -> Any:
    """The document of a job by which the service took an increment that nobody asked for; None while there is none."""
    for job in json.loads(backupd.quietly("jobs", SERVER, "--json")):
        if job["leg"] == "physical.incremental" and job["state"] == "succeeded" and job["result"] != known:
            return job
    return None


def order_in_a_hurry(source: PrivateServer, number: int) -> None:
    """``number`` customers order, each in a transaction of its own."""
    for each in range(number):
        source.execute(
            f"INSERT INTO shop.returns VALUES ({100_000 + each}, 'came in by itself')",
            f"UPDATE shop.orders SET note = 'in a hurry' WHERE id = {5000 + each}",
        )


def stored_bytes(base: Path) -> int:
    """What the destination takes on disk; a file with many names counts once."""
    seen = {
        (info.st_dev, info.st_ino): info.st_blocks * 512
        for path in (base / "backups").rglob("*")
        if (info := path.lstat()) and not path.is_dir()
    }
    return sum(seen.values())


def inodes_of(base: Path, backup_id: str) -> set[int]:
    """The files of one backup's browsable tree."""
    tree = base / "backups" / "servers" / SERVER / backup_id / "files"
    return {path.stat().st_ino for path in tree.rglob("*") if path.is_file()}


def demonstrate(
    base: Path, source: PrivateServer, keys: Keys, bucket: str, postbox: Postbox, size: int
) -> dict[str, Any]:
    """All steps; returns the closing JSON object. Raises DemoFailedError at the first thing that is wrong."""
    step(1, "A server with data")
    begin = time.monotonic()
    source.create_backup_users()
    source.create_user(WRITER, SERVICE_PASSWORD, ["ALL"])
    sample.create(source, size)
    source.settle()
    with source.connect() as connection:
        sums_before = sample.checksum_everything(connection)
        objects_before = sample.describe_everything(connection)
    orders = source.scalar("SELECT COUNT(*) FROM shop.orders")
    letters = source.scalar("SELECT COUNT(*) FROM archive.letters")
    data = sum(path.stat().st_size for path in source.datadir.rglob("*.ibd"))
    version = source.scalar("SELECT VERSION()")
    kinds = ", ".join(f"{len(lines)} {kind}" for kind, lines in objects_before.items())
    say(
        f"MariaDB {version}: {data / MEBIBYTE:.0f} MiB in {len(sums_before)} tables; {kinds}"
        f" (made in {time.monotonic() - begin:.1f} s)"
    )

    step(2, "Is everything ready for backups?")
    port = free_port()
    config = write_configuration(base, source, keys, bucket, port=port, mail_port=postbox.port)
    say(f"$ export BACKUPD_CONFIG={config}")
    backupd = CommandLine(config)
    signer = backupd.ask("keys", "make-signing")["signing_key"]
    say(f"a key that signs what is stored: {signer}")
    sign_with(config, f"signing_key: {signer}")
    backupd.show("check", SERVER)

    step(3, "The first full backup")
    first = backupd.ask("backup", SERVER, "--kind", "full")
    say(
        f"{first['id']}: {first['bytes_source'] / MEBIBYTE:.0f} MiB in {first['files']} files, stored as "
        f"{first['bytes_stored'] / MEBIBYTE:.0f} MiB (compressed, encrypted for {keys.user_id})"
    )
    stored_first = stored_bytes(base)

    step(4, "Work goes on; an increment holds only what changed")
    source.execute(*CHANGES)
    source.settle()
    with source.connect() as connection:
        sums_before = sample.checksum_everything(connection)
        objects_before = sample.describe_everything(connection)
    orders = source.scalar("SELECT COUNT(*) FROM shop.orders")
    increment = backupd.ask("backup", SERVER, "--kind", "incremental")
    say(
        f"{increment['id']}: builds on {increment['parent']}, {increment['bytes_source'] / MEBIBYTE:.1f} MiB read, "
        f"{increment['bytes_new'] / MEBIBYTE:.1f} MiB stored"
    )
    expect(increment["kind"] == "physical-incremental", "it is an increment")

    step(5, "An accident on the source")
    for statement in ("DROP TABLE archive.letters", "DELETE FROM shop.orders WHERE id <= 2500"):
        say(f"SQL> {statement}")
        source.execute(statement)
    say(f"lost: {letters} letters and {orders - source.scalar('SELECT COUNT(*) FROM shop.orders')} orders")

    step(6, "Restore to a fresh server: the full backup and its increment")
    target = f"backup:{increment['id']}"
    datadir = base / "fresh" / "data"
    datadir.parent.mkdir()
    backupd.show("plan", SERVER, "--to", target, "--datadir", str(datadir))
    begin = time.monotonic()
    outcome = backupd.ask("restore", SERVER, "--to", target, "--datadir", str(datadir), "--start")
    restore_seconds = time.monotonic() - begin
    with stopped_at_the_end(outcome["started"]["pid"]):
        phases = ", ".join(f"{phase['name']} {phase['seconds']:.1f} s" for phase in outcome["phases"])
        say(f"a server runs on {datadir} after {restore_seconds:.1f} s: {phases}")
        with contextlib.closing(connect(outcome["started"]["socket"])) as fresh:
            expect(
                query(fresh, "SELECT COUNT(*) FROM archive.letters") == [(letters,)],
                f"the dropped table is back with its {letters} rows",
            )
            expect(
                query(fresh, "SELECT COUNT(*) FROM shop.orders") == [(orders,)],
                f"all {orders} orders are back",
            )
            expect(
                sample.checksum_everything(fresh) == sums_before,
                f"the checksums of all {len(sums_before)} tables equal the source's before the accident",
            )
            expect(
                comparable(sample.describe_everything(fresh)) == comparable(objects_before),
                "views, triggers, routines, events, users and grants are the same",
            )

    step(7, "A second full backup shares what did not change")
    source.settle()
    second = backupd.ask("backup", SERVER, "--kind", "full")
    shared = len(inodes_of(base, first["id"]) & inodes_of(base, second["id"]))
    grown = stored_bytes(base) - stored_first
    say(
        f"{second['id']}: {second['files_linked']} of {second['files']} files unchanged; {shared} files of "
        f"the first backup's tree are hard links of the second's; the destination grew by "
        f"{grown / MEBIBYTE:.1f} MiB"
    )
    expect(shared > 0 and second["files_linked"] > 0, "unchanged files are stored once")
    backupd.show("backups", SERVER)

    step(8, "A test restore of the newest backup proves it")
    proof = backupd.ask("test-restore", SERVER)
    for check in proof["checks"]:
        say(f"   {check['outcome']}: {check['name']}" + (f" ({check['detail']})" if check["detail"] else ""))
    expect(
        proof["outcome"] == "proved",
        f"restored, checked and {proof['tables_compared']} tables compared with the "
        f"source's witness in {proof['seconds']:.1f} s",
    )

    step(9, "By itself: the service follows the binary log, and takes the next increment when its time comes")
    with service(backupd):
        by_itself = until(lambda: increment_of_the_service(backupd, increment["id"]), "an increment by the service")
        say(f"job {by_itself['id']} ({by_itself['leg']}, due {by_itself['due_at']}) made {by_itself['result']}")
        backupd.show("jobs", SERVER)

        step(10, "Orders come in; somebody forgets the WHERE; orders come in")
        order_in_a_hurry(source, 300)
        with source.connect() as connection:
            sums_before = sample.checksum_everything(connection)
        say("SQL> DELETE FROM shop.orders")
        gone = source.scalar("SELECT COUNT(*) FROM shop.orders")
        source.execute("DELETE FROM shop.orders", "INSERT INTO shop.returns VALUES (999999, 'after the accident')")
        moment = format_time(datetime.now(UTC))
        begin = time.monotonic()
        until(
            lambda: json.loads(backupd.quietly("timeline", SERVER, "--json"))["latest"] > moment,
            "the archive reaches the accident",
            60,
        )
        say(f"{gone} orders are gone; {time.monotonic() - begin:.1f} s later everything up to then is recoverable")
        backupd.show("timeline", SERVER)

    step(11, "Which statement was it? Restore to right before it")
    since = by_itself["started_at"]
    words = ("binlog", "search", SERVER, "--table", "shop.orders", "--kind", "delete", "--since", since)
    backupd.show(*words)
    bad = json.loads(backupd.quietly(*words, "--json"))[-1]
    saved = base / "saved" / "data"
    saved.parent.mkdir()
    backupd.show("plan", SERVER, "--to", bad["restore_before"], "--datadir", str(saved))
    begin = time.monotonic()
    outcome = backupd.ask("restore", SERVER, "--to", bad["restore_before"], "--datadir", str(saved), "--start")
    replay_seconds = time.monotonic() - begin
    with stopped_at_the_end(outcome["started"]["pid"]):
        phases = ", ".join(f"{phase['name']} {phase['seconds']:.1f} s" for phase in outcome["phases"])
        say(f"a server runs on {saved} after {replay_seconds:.1f} s: {phases}")
        with contextlib.closing(connect(outcome["started"]["socket"])) as fresh:
            expect(query(fresh, "SELECT COUNT(*) FROM shop.orders") == [(gone,)], f"all {gone} orders are back")
            expect(
                sample.checksum_everything(fresh) == sums_before,
                f"the checksums of all {len(sums_before)} tables equal the source's right before the DELETE",
            )

    step(12, "Or only those tables, into the server that goes on working")
    table_seconds = back_in_place(backupd, source, bad["restore_before"], gone)

    step(13, "The same for others: a restore by the REST interface, and mail about a backup that fails")
    others_come_in(base, backupd, postbox, port, bad["restore_before"], sums_before)

    step(14, "What did the service's retention keep, and why?")
    backupd.show("retention", SERVER)

    step(15, "Is what is stored still what was stored?")
    backupd.show("verify")
    backupd.show("fsck")

    step(16, "The house burns down: server, backups and catalog are gone; a bucket and a private key are left")
    backupd.show("replicate", SERVER)
    backupd.show("backups", SERVER)
    disaster_seconds = out_of_the_ashes(base, source, keys, bucket, signer, bad["restore_before"], sums_before)
    return {
        "proved": True,
        "server": f"MariaDB {version}",
        "data_bytes": data,
        "backups": [first["id"], increment["id"], second["id"], by_itself["result"]],
        "restore_seconds": round(restore_seconds, 3),
        "restored_before": bad["gtid"],
        "point_in_time_seconds": round(replay_seconds, 3),
        "tables_back_in_place_seconds": round(table_seconds, 3),
        "disaster_recovery_seconds": round(disaster_seconds, 3),
        "linked_files": shared,
        "tables_compared": proof["tables_compared"],
        "second_backup_new_bytes": second["bytes_new"],
        "proof_seconds": proof["seconds"],
    }


def back_in_place(backupd: CommandLine, source: PrivateServer, target: str, orders: int) -> float:
    """Orders and their lines as they were at ``target``, into the running server; how long it took, in seconds."""
    tables = ("--tables", "shop.orders", "--tables", "shop.order_lines")
    backupd.ask("backup", SERVER, "--kind", "logical")
    backupd.show("plan", SERVER, "--to", target, *tables)
    others = source.scalar("SELECT COUNT(*) FROM shop.returns")
    backupd.show("restore", SERVER, "--to", target, *tables, "--into", SERVER, "--compare")
    begin = time.monotonic()
    outcome = backupd.ask("restore", SERVER, "--to", target, *tables, "--into", SERVER, "--confirm", SERVER)
    seconds = time.monotonic() - begin
    for table in outcome["tables"]:
        say(f"{table['source']}: {table['rows']} rows; the table before it is now {table['aside']}")
    expect(source.scalar("SELECT COUNT(*) FROM shop.orders") == orders, f"all {orders} orders are back in place")
    expect(source.scalar("SELECT COUNT(*) FROM shop.returns") == others, "what else was written since is untouched")
    expect(
        source.scalar(
            "SELECT COUNT(*) FROM shop.order_lines l LEFT JOIN shop.orders o ON o.id = l.order_id WHERE o.id IS NULL"
        )
        == 0,
        "every line has its order: the foreign keys hold",
    )
    return seconds


def out_of_the_ashes(
    base: Path, source: PrivateServer, keys: Keys, bucket: str, signer: str, target: str, sums: dict[str, int]
) -> float:
    """Everything but the bucket is destroyed; the server comes back on another machine as it was at ``target``. Gives
    the seconds from an empty machine to a server that answers."""
    source.kill()
    for name in ("backups", "spool", "policies", "scratch"):
        shutil.rmtree(base / name)
    for path in base.glob("catalog.db*"):
        path.unlink()
    say("gone: the server's process, the destination local, the catalog, the spool, the policies")
    away = base / "elsewhere"
    config = configuration_elsewhere(away, keys, bucket, signer)
    say(f"$ export BACKUPD_CONFIG={config}")
    backupd = CommandLine(config)
    begin = time.monotonic()
    backupd.show("catalog", "rebuild", "--from", "offsite")
    backupd.show("timeline", SERVER)
    outcome = backupd.ask("restore", SERVER, "--to", target, "--datadir", str(away / "data"), "--start")
    seconds = time.monotonic() - begin
    with stopped_at_the_end(outcome["started"]["pid"]):
        phases = ", ".join(f"{phase['name']} {phase['seconds']:.1f} s" for phase in outcome["phases"])
        say(f"a server runs there {seconds:.1f} s after the machine was empty: {phases}")
        with contextlib.closing(connect(outcome["started"]["socket"])) as fresh:
            expect(
                sample.checksum_everything(fresh) == sums,
                f"the checksums of all {len(sums)} tables equal the source's right before the DELETE",
            )
    return seconds


def comparable(described: dict[str, list[str]]) -> dict[str, list[str]]:
    """Without what a restored server is meant to have differently: the state of its events."""
    return described | {
        "events": [re.sub(r" (ENABLED|DISABLED|SLAVESIDE_DISABLED) ", " ", line) for line in described["events"]]
    }


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--megabytes", type=int, default=600, help="size of the sample data (default 600)")
    size = arguments.parse_args().megabytes * 1_000_000
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))  # so that everything is stopped
    begin = time.monotonic()
    result: dict[str, Any]
    try:
        with (
            short_directory("bd-") as base,
            operator_keys() as keys,
            PrivateServer() as source,
            a_bucket() as bucket,
            Postbox() as postbox,
        ):
            result = demonstrate(base, source, keys, bucket, postbox, size)
    except DemoFailedError as error:
        say(f"\nFAILED: {error}")
        result = {"proved": False, "error": str(error)}
    else:
        say(f"\nDone in {time.monotonic() - begin:.0f} s; everything that was started is stopped and removed.")
    say(json.dumps(result))
    return 0 if result["proved"] else 1


if __name__ == "__main__":
    sys.exit(main())
