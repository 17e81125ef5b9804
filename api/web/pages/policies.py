"""Policies as their files say, with a word where the service follows something else, and a place to try what a change
of one would mean before a file is touched."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response

from api.auth import Acting, allowed
from api.limits import CHECKS
from api.web.forms import Form, form
from api.web.site import render
from backupd.model.access import Role
from policies import reference

policy_routes = APIRouter(include_in_schema=False)

_VIEWER = [Depends(allowed(Role.VIEWER))]


@policy_routes.get("/policies", dependencies=_VIEWER)
def list_policies(request: Request, service: Acting) -> Response:
    return render(request, "policies.html", policies=service.listings.policies())


@policy_routes.get("/policies/new", dependencies=_VIEWER)
def example(request: Request) -> Response:
    """A complete example to start from."""
    return render(request, "policy_check.html", name="", text=reference.example("gold"), checked=None)


@policy_routes.get("/policies/{name}", dependencies=_VIEWER)
def show_policy(request: Request, name: str, service: Acting) -> Response:
    return render(request, "policy.html", policy=service.listings.policy(name))


@policy_routes.get("/policies/{name}/check", dependencies=_VIEWER)
def change(request: Request, name: str, service: Acting) -> Response:
    """Its text, to be changed and checked; no file is written."""
    found = service.listings.policy(name)
    return render(request, "policy_check.html", name=found.name, text=found.text, checked=None)


@policy_routes.post("/policies/validate", dependencies=_VIEWER)
def check(request: Request, service: Acting, sent: Annotated[Form, Depends(form)]) -> Response:
    """Everything that is wrong with a text, each with its line; no file is written."""
    text, name = sent.raw("text"), sent.text("name")
    with CHECKS.one("texts of policies are checked"):
        found = service.listings.validate_policy(text, name or "policy")
    return render(request, "policy_check.html", status=200 if found.valid else 422, name=name, text=text, checked=found)
