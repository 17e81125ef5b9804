"""Every page of the web interface."""

from __future__ import annotations

from fastapi import APIRouter

from api.web.pages import administration, buttons, jobs, lists, server, wizard
from api.web.pages import administration as login

ROUTERS: tuple[APIRouter, ...] = (
    lists.overview_routes,
    server.router,
    lists.router,
    jobs.router,
    login.router,
    wizard.router,
    server.retention_routes,
    administration.policy_routes,
    administration.audit_routes,
    administration.router,
    buttons.router,
)
