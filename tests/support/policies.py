"""A policy file by itself."""

from __future__ import annotations

from pathlib import Path

from backupd.model.errors import ConfigurationError
from policies.load import read_policy
from policies.policy import Policy


def load_policy(path: Path) -> Policy:
    """One policy file by itself; its destinations are not looked up. Raises ConfigurationError."""
    found = read_policy(path)
    if found.policy is None or found.problems:
        raise ConfigurationError(found.problems)
    return found.policy
