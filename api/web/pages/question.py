"""What somebody asks of the restore wizard, as its form holds it: text that may still be wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from urllib.parse import urlencode

from api.web.forms import Form, moment_of
from backupd.app.restores.request import RestoreRequest
from backupd.model.errors import UsageError
from backupd.model.text import format_time

_HINT = "fill in what is missing; nothing was done"


@dataclass(frozen=True, slots=True)
class Question:
    """``what``: whole or tables; ``when``: latest, time (then ``at``) or target (then ``target``); the rest as in
    ``RestoreRequest``. What belongs to the other choice is kept, so that one may change one's mind."""

    server: str = ""
    what: str = "whole"
    when: str = "latest"
    at: str = ""
    target: str = ""
    tables: tuple[str, ...] = ()
    datadir: str = ""
    start: bool = False
    mode: str = "new-server"
    into: str = ""
    rename: str = ""
    sql: str = ""
    compare: bool = False
    triggers: str = "backup"
    exclude: tuple[str, ...] = ()
    replay_with: str = ""
    source: str = ""
    thaw: str = ""
    accept_older: bool = False
    accept_inexact: bool = False

    @classmethod
    def of(cls, form: Form) -> Question:
        return cls(
            server=form.text("server"),
            what=form.text("what") or "whole",
            when=form.text("when") or "latest",
            at=form.text("at"),
            target=form.text("target"),
            tables=form.lines("tables"),
            datadir=form.text("datadir"),
            start=form.has("start"),
            mode=form.text("mode") or "new-server",
            into=form.text("into"),
            rename=form.text("as"),
            sql=form.text("sql"),
            compare=form.has("compare"),
            triggers=form.text("triggers") or "backup",
            exclude=form.lines("exclude"),
            replay_with=form.text("replay_with"),
            source=form.text("source"),
            thaw=form.text("thaw"),
            accept_older=form.has("accept_older"),
            accept_inexact=form.has("accept_inexact"),
        )

    @classmethod
    def linked(cls, form: Form) -> Question:
        """As ``of``, where a link leads here that names a target or tables and says no more."""
        found = cls.of(form)
        when = form.text("when") or ("target" if found.target not in ("", "latest") else "latest")
        what = form.text("what") or ("tables" if found.tables else "whole")
        return replace(found, when=when, what=what, target="" if found.target == "latest" else found.target)

    @classmethod
    def again(cls, document: Mapping[str, object]) -> Question:
        """The question that a request (its JSON) came of, so that it can be changed."""
        asked = RestoreRequest.from_json(dict(document))
        latest = asked.target == "latest"
        return cls(
            server=asked.server,
            what="tables" if asked.mode == "tables" else "whole",
            when="latest" if latest else "target",
            target="" if latest else asked.target,
            tables=tuple(asked.tables),
            datadir=asked.datadir,
            start=asked.start,
            mode="new-server" if asked.mode == "tables" else asked.mode,
            into=asked.into,
            rename=asked.rename,
            sql=asked.sql,
            compare=asked.compare,
            triggers=asked.triggers,
            exclude=tuple(asked.exclude),
            replay_with=asked.replay_with,
            source=asked.source,
            thaw=asked.thaw,
            accept_older=asked.accept_older,
            accept_inexact=asked.accept_inexact,
        )

    def query(self) -> str:
        """For a link that brings this question back: only what was answered."""
        written = {
            **asdict(self),
            "as": self.rename,
            "start": "yes" if self.start else "",
            "compare": "yes" if self.compare else "",
            "accept_older": "yes" if self.accept_older else "",
            "accept_inexact": "yes" if self.accept_inexact else "",
            "tables": "\n".join(self.tables),
            "exclude": "\n".join(self.exclude),
        }
        del written["rename"]
        return urlencode({name: str(value) for name, value in written.items() if value})

    def wanted(self) -> str:
        """The target. Raises UsageError."""
        if self.when == "time":
            return format_time(moment_of(self.at))
        if self.when == "target":
            if not self.target:
                raise UsageError("no target is named", hint=_HINT)
            return self.target
        return "latest"

    def request(self) -> RestoreRequest:
        """Raises UsageError with what is missing."""
        if not self.server:
            raise UsageError("which server? None was chosen", hint=_HINT)
        target = self.wanted()
        if self.what == "tables":
            return RestoreRequest(
                server=self.server,
                target=target,
                mode="tables",
                tables=self.tables,
                into=self.into,
                rename=self.rename,
                sql=self.sql,
                compare=self.compare,
                triggers=self.triggers,
                exclude=self.exclude,
                thaw=self.thaw,
                source=self.source,
                accept_older=self.accept_older,
                accept_inexact=self.accept_inexact,
            )
        return RestoreRequest(
            server=self.server,
            target=target,
            mode=self.mode,
            datadir=self.datadir,
            start=self.start,
            exclude=self.exclude,
            replay_with=self.replay_with,
            thaw=self.thaw,
            accept_older=self.accept_older,
            accept_inexact=self.accept_inexact,
        )
