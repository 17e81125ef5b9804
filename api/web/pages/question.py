"""What somebody asks of the restore wizard, as its form holds it: text that may still be wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any
from urllib.parse import urlencode

from api.web.forms import Form, moment_of
from backupd.app.restores.request import RestoreRequest
from backupd.model.errors import UsageError
from backupd.model.text import format_time

_HINT = "fill in what is missing; nothing was done"


@dataclass(frozen=True, slots=True)
class Question(RestoreRequest):
    """The fields of a request as the form has them, with two choices in the place of ``mode`` and ``target``. ``what``:
    whole or tables; ``when``: latest, time (then ``at``) or target (then ``target``). What belongs to the other choice
    is kept, so that one may change one's mind."""

    server: str = ""
    target: str = ""
    what: str = "whole"
    when: str = "latest"
    at: str = ""

    @classmethod
    def of(cls, form: Form) -> Question:
        return cls(**{one.name: _read(form, _form_name(one.name), one.default) for one in fields(cls)})

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
        kept = {one.name: getattr(asked, one.name) for one in fields(asked)}
        chosen = {
            "what": "tables" if asked.of_tables else "whole",
            "when": "latest" if latest else "target",
            "target": "" if latest else asked.target,
            "mode": "new-server" if asked.of_tables else asked.mode,
        }
        return cls(**{**kept, **chosen})

    def query(self) -> str:
        """For a link that brings this question back: only what was answered."""
        written = {_form_name(one.name): _written(getattr(self, one.name)) for one in fields(self)}
        return urlencode({name: text for name, text in written.items() if text})

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
        asked = {one.name: getattr(self, one.name) for one in fields(RestoreRequest)}
        asked["target"] = self.wanted()
        if self.what == "tables":
            asked["mode"] = "tables"
        return RestoreRequest(**asked).alone()


def _form_name(field: str) -> str:
    return "as" if field == "rename" else field


def _read(form: Form, name: str, default: object) -> Any:
    """The answer in a form, of the type of ``default``."""
    if isinstance(default, bool):
        return form.has(name)
    if isinstance(default, tuple):
        return form.lines(name)
    return form.text(name) or default


def _written(answer: object) -> str:
    """An answer as ``_read`` takes it, "" for none."""
    if isinstance(answer, bool):
        return "yes" if answer else ""
    return "\n".join(answer) if isinstance(answer, tuple) else str(answer)
