"""The entry point ``backupd``."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Annotated

import typer

from backupd.cli.commands import (
    access,
    alerts,
    backups,
    binlog,
    catalog,
    jobs,
    keys,
    policy,
    restores,
    serve,
    tables,
    work,
)
from backupd.cli.output import Screen, explained, mute
from backupd.cli.session import Commands, Config, Json, StoppedError, remember
from backupd.process.runtime import hide_memory, return_large_blocks

app = Commands(
    shared=False,
    help="Backups of MySQL and MariaDB that are proved to restore.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"backupd {version('backupd')}")
        raise typer.Exit


@app.callback()
def root(
    context: typer.Context,
    config: Config = None,
    as_json: Json = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    del version
    remember(context, config, as_json)


app.command(takes=("config",))(serve.serve)
app.command(opening="looks")(work.check)
app.command(opening="works")(work.backup)
app.add_typer(backups.app, name="backups")
app.command()(restores.plan)
app.command()(restores.restore)
app.command("thaw")(restores.thaw)
app.command("leftovers")(tables.leftovers)
app.command("test-restore")(restores.prove)
app.command()(work.verify)
app.command()(work.replicate)
app.command()(restores.runbook)
app.add_typer(policy.app, name="policy")
app.add_typer(work.server_app, name="server")
app.command()(backups.retention)
app.command()(backups.hold)
app.command()(backups.pause)
app.command()(backups.resume)
app.command()(work.fsck)
app.command("recover-versions")(catalog.bring_back)
app.command("bring-back", hidden=True)(catalog.bring_back)  # its name until 2026-11, for good
app.add_typer(keys.app, name="keys")
app.add_typer(jobs.app, name="jobs")
app.command("run-job", hidden=True)(serve.run_job)
app.command("timeline")(binlog.timeline)
app.add_typer(binlog.app, name="binlog")
app.command("run-stream", takes=("config",), hidden=True)(serve.run_stream)
app.add_typer(catalog.app, name="catalog")
app.add_typer(alerts.app, name="alerts")
app.add_typer(access.app, name="token")
app.command()(access.audit)
app.command("run-api", takes=("config",), hidden=True)(serve.run_api)


@contextmanager
def _stoppable() -> Iterator[None]:
    """SIGTERM and SIGHUP unwind like Ctrl-C, so that a stopped backup leaves nothing behind. Only the first one: a
    second must not disturb the cleaning up. One that is ignored (nohup, `backupd serve`) stays so."""
    stopped: list[int] = []

    def stop(number: int, _frame: FrameType | None) -> None:
        if not stopped:
            stopped.append(number)
            raise StoppedError(number)

    heeded = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, stop) for number in heeded}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _hold_standard_descriptors() -> None:
    """Fill closed descriptors 0 to 2 with /dev/null: a file of ours opened there would get what tools print."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number: this one


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code.

    0 success, 1 failure, 2 wrong usage or invalid configuration, 128 + the signal that stopped it.
    """
    _hold_standard_descriptors()
    return_large_blocks()
    hide_memory()
    mask = os.umask(0o077)  # whatever it was: nobody else reads or changes what we make, but where we say so
    try:
        with _stoppable():
            app(args=None if argv is None else list(argv), prog_name="backupd")
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else int(done.code is not None)
    except KeyboardInterrupt as interrupt:
        return 128 + (interrupt.number if isinstance(interrupt, StoppedError) else signal.SIGINT)
    except Exception as error:  # noqa: BLE001  last resort, such as --help on a full stdout; all is told
        if sys.stdout is not None:
            mute(sys.stdout)
        Screen(as_json=False).error(explained(error, "backupd"))
        return 1
    finally:
        os.umask(mask)
    return 0
