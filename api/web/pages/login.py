"""Coming in and going out: with a token once, then by the session's cookie."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import RedirectResponse

from api import auth
from api.auth import allowed, anybody, current_session
from api.problems import problem
from api.web.forms import Form, back_to, form, login_form, own_path
from api.web.site import render
from api.web.words import problem_of
from backupd.model.access import Role
from backupd.model.errors import BackupdError, UnauthenticatedError

router = APIRouter(include_in_schema=False)


@router.get("/login", dependencies=[Depends(anybody)])
def ask(request: Request) -> Response:
    """The login; who is logged in already goes on."""
    goal = own_path(request.query_params.get("next", "/"))
    if current_session(request) is not None:
        return RedirectResponse(goal, status_code=303)
    return render(request, "login.html", next=goal, problem=None)


@router.post("/login", dependencies=[Depends(anybody)])
def enter(request: Request, sent: Annotated[Form, Depends(login_form)]) -> Response:
    """Begin a session, and go to where one was led away from. The session of before, where there is one, ends."""
    goal = own_path(sent.text("next") or "/")
    try:
        session, cookie, _actor = auth.enter(request, sent.text("token"))
    except BackupdError as error:
        status, _document, headers = problem(error)
        kept = {name: value for name, value in headers.items() if name == "Retry-After"}
        # 401 would have the browser ask by itself, and in the way of the form.
        return render(
            request,
            "login.html",
            status=403 if isinstance(error, UnauthenticatedError) else status,
            headers=kept,
            next=goal,
            problem=problem_of(error),
        )
    answer = RedirectResponse(goal, status_code=303)
    auth.leave(request, answer)
    auth.set_cookie(request, answer, session, cookie)
    return answer


@router.post("/logout", dependencies=[Depends(allowed(Role.VIEWER))])
def leave(request: Request, sent: Annotated[Form, Depends(form)]) -> Response:
    """The session ends here and in the catalog, so that the cookie is worth nothing any more."""
    del sent  # it was ours, which is all that had to be known
    answer = back_to("/login", "logged-out")
    auth.leave(request, answer)
    return answer
