"""Does the account see everything that the logical backups of a policy ask for?"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from backupd.backup.checks.finding import Finding, warning
from backupd.engine.server.grants import Grants, hidden, unseen
from backupd.engine.sql.client import Session
from backupd.engine.sql.tables import SYSTEM_SCHEMAS
from backupd.model.server_facts import Flavour, ServerInfo, Version
from backupd.model.table import TablePattern
from policies.schema import Logical

SUBJECT = "logical backups"
_SHOWN = 10
_SCHEMAS = "SELECT SCHEMA_NAME FROM information_schema.SCHEMATA"
_HINT = "grant it on *.*, or let tables.include name only the schemas that it may see"


def examine_sight(session: Session, info: ServerInfo, grants: Grants, logical: Logical) -> Iterator[Finding]:
    """Raises ServerError."""
    include = [
        TablePattern.parse(text)
        for text in dict.fromkeys(text for _cadence, tables in logical.selections.values() for text in tables.include)
    ]
    yield from (warning(SUBJECT, sentence, _HINT) for sentence in unseen(grants, include))
    schemas = sorted({str(name) for (name,) in session.query(_SCHEMAS)} - set(SYSTEM_SCHEMAS))
    lacking: dict[tuple[str, str], list[str]] = defaultdict(list)
    for schema in schemas:
        if any(pattern.takes_all_of(schema) for pattern in include):
            for kind in hidden(grants, schema).items():
                lacking[kind].append(schema)
    for (what, lack), where in lacking.items():
        shown = ", ".join(where[:_SHOWN]) + (f" and {len(where) - _SHOWN} more" if len(where) > _SHOWN else "")
        yield warning(SUBJECT, f"{grants.account} has {lack}: {what} of {shown} may be missing in them", _HINT)
    asks = info.flavour is not Flavour.MARIADB and info.version >= Version(8, 0)
    if info.log_bin and asks and not grants.allow("XA_RECOVER_ADMIN"):
        user, _, host = grants.account.rpartition("@")
        yield warning(
            SUBJECT,
            f"{grants.account} lacks XA_RECOVER_ADMIN: XA transactions that are prepared when a "
            "dump begins stay unknown, and a dump cannot be rolled forward over their commit",
            f"GRANT XA_RECOVER_ADMIN ON *.* TO '{user}'@'{host}'",
        )
