"""The pages that do something."""

from __future__ import annotations

from api.web.actions import buttons as actions
from api.web.actions import session
from api.web.pages import audit, policies, retention, tokens, wizard

ROUTERS = (
    session.router,
    wizard.router,
    retention.router,
    policies.router,
    audit.router,
    tokens.router,
    actions.router,
)
