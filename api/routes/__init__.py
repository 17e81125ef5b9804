"""Every route of the REST interface, by chapters of its reference."""

from __future__ import annotations

from fastapi import APIRouter

from api.routes import access, alerts, backups, events, holds, jobs, places, policies, proofs, restores, servers, work

ROUTERS: tuple[APIRouter, ...] = tuple(
    module.router
    for module in (servers, backups, restores, work, jobs, proofs, places, policies, events, alerts, holds, access)
)
