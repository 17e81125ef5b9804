"""The pages that do something."""

from __future__ import annotations

from api.web import actions, audit, policies, retention, session, tokens, wizard

ROUTERS = (
    session.router,
    wizard.router,
    retention.router,
    policies.router,
    audit.router,
    tokens.router,
    actions.router,
)
