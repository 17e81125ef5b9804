"""Moments that lie behind what is known to be archived. Pure.

That a transaction with a later time is archived does not show that everything before it is: a session may stamp what it
commits with any time, and whatever came behind that one may be missing.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from backupd.model.binlog import Branch, Run
from backupd.model.clock import format_time
from backupd.model.errors import RefusedError
from backupd.recovery.branches import Histories
from backupd.recovery.runs import last_of
from backupd.recovery.windows import complete_until


def refuse_beyond(histories: Histories, branch: Branch, run: Run, others: Iterable[Run | None], moment: datetime, *,
                  later: datetime | None, now: datetime) -> None:
    """Raises RefusedError where nothing shows that all that was committed by ``moment`` is in ``run``, which is of
    ``branch``, and in ``others`` that a replay goes through.

    ``later``: the stamp of an archived transaction behind the target. It has to do where the server was never asked,
    if it is not in the future.
    """
    asked = [one for one in (run, *others) if one is not None and one.confirmed_at is not None]
    known = [at for one in asked if (at := complete_until(one, now)) is not None]
    stamped = run.confirmed_at is None and later is not None and later <= now
    if not stamped and all(moment > at for at in known):
        raise beyond(histories, branch, run, moment, max(known, default=None))


def beyond(histories: Histories, branch: Branch, run: Run, moment: datetime, known: datetime | None) -> RefusedError:
    """The refusal of a moment that is behind ``known``, up to which everything is in ``run``."""
    following = histories.run_after(branch.id, last_of(run))
    there = f"{branch.file(run.last_number)}:{run.last_pos}"
    resumes = f"{branch.file(following.first_number)}:{following.first_pos}" if following else ""
    certain = f"; everything up to {format_time(known)} is there" if known else ""
    latest = "--to latest" + ("" if branch is histories.current else f"@{branch.id}")
    return RefusedError(
        f"{format_time(moment)} is not recoverable: branch {branch.id} is archived up to {there}"
        f"{f' and goes on at {resumes}' if resumes else ''}, and more may have been committed by then{certain}",
        detail=f"gap: after {there}" + (f", before {resumes}" if resumes else ""),
        hint=(f"--to {format_time(known)} is the last moment that is certain, " if known else "")
        + f"{latest} all that is archived; `backupd timeline {histories.server}` shows the others")
