"""Somebody with a browser, as far as HTTP goes: a cookie, and the word that the forms of its session bring along."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping
from dataclasses import dataclass

import httpx

from backupd.model.access import Role
from tests.support.service.rig import Rig

_CSRF = re.compile(r'name="csrf" value="([^"]+)"')


@dataclass(frozen=True)
class Visitor:
    http: httpx.Client
    csrf: str

    def get(self, address: str) -> httpx.Response:
        return self.http.get(address)

    def send(self, address: str, fields: Mapping[str, str] | None = None, **headers: str) -> httpx.Response:
        """A form of our own page."""
        return self.http.post(
            address,
            data={"csrf": self.csrf, **(fields or {})},
            headers={name.replace("_", "-"): value for name, value in headers.items()},
        )


def stranger(site: Rig) -> httpx.Client:
    http = site.client()
    http.headers["Accept"] = "text/html"
    return http


def visitor(site: Rig, role: Role, servers: frozenset[str] | None = None) -> Visitor:
    """Logged in with a token of that role."""
    http = stranger(site)
    entered = http.post("/login", data={"token": site.secret(role, servers), "next": "/restore"})
    assert (entered.status_code, entered.headers["Location"]) == (303, "/restore"), entered.text
    found = _CSRF.search(http.get("/restore").text)
    assert found is not None
    return Visitor(http, html.unescape(found.group(1)))
