"""Every route of the REST interface, by chapters of its reference."""

from __future__ import annotations

from fastapi import APIRouter

from api.routes import access, backups, jobs, restores, servers

ROUTERS: tuple[APIRouter, ...] = (
    servers.router,
    backups.router,
    restores.router,
    jobs.work_routes,
    jobs.router,
    backups.proof_routes,
    servers.destination_routes,
    access.policy_routes,
    jobs.event_routes,
    jobs.alert_routes,
    servers.hold_routes,
    access.router,
)
