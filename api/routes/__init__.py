"""Every route of the REST interface, by chapters of its reference."""

from __future__ import annotations

from fastapi import APIRouter

from api.routes import access, alerts, backups, events, holds, jobs, places, policies, proofs, restores, servers, work

ROUTERS: tuple[APIRouter, ...] = (
    servers.router,
    backups.router,
    restores.router,
    work.work_routes,
    jobs.router,
    proofs.proof_routes,
    places.destination_routes,
    policies.policy_routes,
    events.event_routes,
    alerts.router,
    holds.hold_routes,
    access.router,
)
