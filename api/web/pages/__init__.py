"""Every page of the web interface."""

from __future__ import annotations

from fastapi import APIRouter

from api.web.actions import buttons, session
from api.web.pages import audit, jobs, lists, overview, policies, retention, server, tokens, wizard

ROUTERS: tuple[APIRouter, ...] = (
    overview.overview_routes,
    server.router,
    lists.router,
    jobs.router,
    session.router,
    wizard.router,
    retention.retention_routes,
    policies.policy_routes,
    audit.audit_routes,
    tokens.router,
    buttons.router,
)
