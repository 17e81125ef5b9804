"""The restore wizard: a question, the plan that answers it, its start; and the search for the statement that did it.

Every step is a page by itself and needs no script. A plan has an address, so that somebody else can be asked to look.
``Question`` is the form's text, which may still be wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any
from urllib.parse import urlencode

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import RedirectResponse

from api.auth import Acting, CurrentActor, Wired, allowed
from api.middleware import SEARCHES, SEARCHING
from api.problems import status_of
from api.web.site import Form, Sent, link, moment_of, render
from api.web.words import problem_of
from backupd.app.binlogs.search import Found, TooLongError
from backupd.app.context.wiring import Wiring
from backupd.app.restores.jobs import PlanChangedError, UnconfirmedError
from backupd.app.restores.request import RestoreRequest
from backupd.app.service.facade import Service
from backupd.catalog.restores import StoredPlan
from backupd.model.access import Role
from backupd.model.binlog import Change, ChangeKind
from backupd.model.errors import BackupdError, DamagedError, DestinationError, UsageError
from backupd.model.table import TableName
from backupd.model.text import format_time
from restore.planning.inexact_replay import InexactError
from restore.planning.target import OlderError

_HINT = "fill in what is missing; nothing was done"


@dataclass(frozen=True, slots=True)
class Question(RestoreRequest):
    """The fields of a request as the form has them, with two choices instead of ``mode`` and ``target``. ``what``:
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
    if isinstance(default, int):
        number = form.text(name)
        return int(number) if number.isascii() and number.isdecimal() and len(number) <= 10 else default
    return form.text(name) or default


def _written(answer: object) -> str:
    """An answer as ``_read`` takes it, "" for none."""
    if isinstance(answer, bool):
        return "yes" if answer else ""
    return "\n".join(answer) if isinstance(answer, tuple) else str(answer or "")


router = APIRouter(include_in_schema=False)

FOUND = 50
"""Transactions that one page of a search shows."""

_VIEWER = [Depends(allowed(Role.VIEWER))]


@router.get("/restore", dependencies=_VIEWER)
def question(request: Request, service: Acting, wiring: Wired) -> Response:
    """The question. What the address says is filled in; ``?again=ID`` asks what that restore was asked for: one that
    did not come to its end goes on when the same is asked again."""
    asked = _query(request)
    again = asked.text("again")
    if not again:
        return _ask(request, service, wiring, Question.linked(asked))
    record = service.requests.restore_view(again).record
    wanted = (record.request or {}).get("request")
    found = (
        Question.again(wanted)
        if wanted
        else Question(server=record.server, when="target", target=record.target, datadir=record.datadir)
    )
    return _ask(request, service, wiring, found)


@router.post("/restore", dependencies=_VIEWER)
def answer(request: Request, service: Acting, wiring: Wired, actor: CurrentActor, sent: Sent) -> Response:
    """The plan that answers it, or the question again with what is wrong. Who may start it has to say where to."""
    asked = Question.of(sent)
    if sent.text("step") == "search":
        tables = "\n".join(asked.tables)
        return RedirectResponse(link("restore", "search", server=asked.server, table=tables), status_code=303)
    try:
        wanted = asked.request()
        wanted.check()
        if actor.has(Role.OPERATOR):
            wanted.check_target_folder()
        made = service.requests.plan(wanted)
    except BackupdError as error:
        return _ask(request, service, wiring, asked, error)
    return RedirectResponse(link("restore", "plans", made.id), status_code=303)


@router.get("/restore/plans/{plan_id}", dependencies=_VIEWER)
def plan(request: Request, plan_id: str, service: Acting) -> Response:
    return _plan(request, service.requests.stored_plan(plan_id))


@router.post("/restore/plans/{plan_id}", dependencies=[Depends(allowed(Role.OPERATOR))])
def start(request: Request, plan_id: str, service: Acting, sent: Sent) -> Response:
    """Start it: the page of its job. Where something has to be confirmed or has changed, the plan again."""
    requests = service.requests
    try:
        _record, job = requests.restore(plan_id, sent.text("confirm") or None)
    except PlanChangedError as error:
        return _plan(request, error.plan, error)
    except UnconfirmedError as error:
        return _plan(request, requests.stored_plan(plan_id), error, confirm=error.confirm)
    except BackupdError as error:
        return _plan(request, requests.stored_plan(plan_id), error)
    return RedirectResponse(link("jobs", job.id), status_code=303)


@router.get("/restore/search", dependencies=_VIEWER)
def search(request: Request, service: Acting) -> Response:
    """Which transaction did it? Each one that is found leads to a restore to right before it."""
    asked = _query(request)
    found: list[Found] = []
    error: BackupdError | None = None
    looked = bool(asked.text("server") and asked.has("look"))
    if looked:
        try:
            found, error = _look(service, asked)
        except BackupdError as refused:
            error = refused
    values = {name: asked.text(name) for name in ("server", "since", "until", "gtid")}
    return render(
        request,
        "restore_search.html",
        status=status_of(error) if error is not None and not found else 200,
        asked={**values, "table": "\n".join(asked.lines("table")), "kinds": asked.lines("kind")},
        servers=service.listings.servers(),
        kinds=[str(kind) for kind in ChangeKind],
        found=found[:FOUND],
        more=len(found) > FOUND,
        looked=looked,
        quoted=_quoted,
        problem=problem_of(error) if error is not None else None,
    )


def _look(service: Service, asked: Form) -> tuple[list[Found], BackupdError | None]:
    """What is found, and what kept it from being all. Raises what is wrong with the question."""
    try:
        kinds = tuple(ChangeKind(word) for word in asked.lines("kind"))
    except ValueError as error:
        raise UsageError(f"kinds are {', '.join(ChangeKind)}") from error
    since, until = asked.text("since"), asked.text("until")
    found: list[Found] = []
    try:
        with SEARCHES.one("binary logs are searched"):
            for one in service.binlogs.search(
                asked.text("server"),
                tables=asked.lines("table"),
                kinds=kinds,
                since=moment_of(since) if since else None,
                until=moment_of(until) if until else None,
                gtid=asked.text("gtid") or None,
                limit=FOUND + 1,
                seconds=SEARCHING,
            ):
                found.append(one)
    except (DamagedError, DestinationError, TooLongError) as error:
        return found, error
    return found, None


def _quoted(changes: Sequence[Change]) -> str:
    """The tables of these changes, for the wizard's question."""
    return "\n".join(dict.fromkeys(TableName(change.schema, change.name).shown for change in changes))


def _query(request: Request) -> Form:
    names = request.query_params.keys()
    return Form({name: request.query_params.getlist(name) for name in names})


def _ask(
    request: Request,
    service: Service,
    wiring: Wiring,
    asked: Question,
    error: BackupdError | None = None,
) -> Response:
    servers = service.listings.servers()
    shown: Any = None
    if asked.server in servers:
        (shown,) = service.servers.overview([asked.server])
    elif len(servers) == 1 and not asked.server:
        return _ask(request, service, wiring, replace(asked, server=servers[0]), error)
    return render(
        request,
        "restore.html",
        refused=error,
        asked=asked,
        servers=servers,
        shown=shown,
        folders=_folders(wiring),
        accept_older=isinstance(error, OlderError),
        accept_inexact=isinstance(error, InexactError),
    )


def _folders(wiring: Wiring) -> tuple[str, ...]:
    """Those beneath which operators may restore."""
    restore = wiring.settings.restore
    return tuple(str(path) for path in restore.folders) if restore is not None else ()


def _plan(request: Request, found: StoredPlan, error: BackupdError | None = None, *, confirm: str = "") -> Response:
    planned, nowhere = RestoreRequest.from_json(found.request), None
    asked = Question.again(found.request)
    try:
        planned.check_target_folder()
    except UsageError as missing:
        nowhere = problem_of(missing)
    return render(
        request,
        "restore_plan.html",
        refused=error,
        stored=found,
        plan=found.document,
        wanted=asked,
        confirm=confirm or (asked.into if planned.replaces_live else ""),
        nowhere=nowhere,
        changed=isinstance(error, PlanChangedError),
    )
