"""What a schema holds besides tables: itself, views, routines and events, as scripts for a client.

Names in them are printed without the schema wherever the server can, so that they can be loaded into another one.
Views stand in an order in which each finds the views that it reads; a view that does not work on the source any more
comes last, as a comment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from backupd.engine.schema.definition_text import tokens
from backupd.engine.schema.files import plain_session
from backupd.engine.schema.scripts import Stored, script
from backupd.engine.server.grants import read_grants
from backupd.engine.server.visibility import hidden
from backupd.engine.sql.client import Session
from backupd.model.errors import NotFoundError, ServerError
from backupd.model.table import quote_name, schema_folder

_VIEWS = "SELECT TABLE_NAME, VIEW_DEFINITION FROM information_schema.VIEWS WHERE TABLE_SCHEMA = %s ORDER BY TABLE_NAME"
_ROUTINES = """
SELECT ROUTINE_TYPE, ROUTINE_NAME FROM information_schema.ROUTINES WHERE ROUTINE_SCHEMA = %s
ORDER BY FIELD(ROUTINE_TYPE, 'PACKAGE', 'PACKAGE BODY', 'FUNCTION', 'PROCEDURE'), ROUTINE_NAME
"""
_EVENTS = "SELECT EVENT_NAME FROM information_schema.EVENTS WHERE EVENT_SCHEMA = %s ORDER BY EVENT_NAME"
_COLLATION = "SELECT DEFAULT_COLLATION_NAME FROM information_schema.SCHEMATA WHERE SCHEMA_NAME = %s"
_INVALID_VIEW = 1356


@dataclass(frozen=True, slots=True)
class SchemaScripts:
    """Each a client script, or empty. ``unread``: what could not be read, and why, a sentence each."""

    schema: str
    create: str
    views: str = ""
    routines: str = ""
    events: str = ""
    unread: tuple[str, ...] = ()

    def files(self) -> dict[str, bytes]:
        """By their paths in a logical backup; only those with something in them."""
        texts = {"create": self.create, "views": self.views, "routines": self.routines, "events": self.events}
        return {
            f"{schema_folder(self.schema)}{name}.sql": text.encode("utf-8", "surrogateescape")
            for name, text in texts.items()
            if text
        }


def read_schema(session: Session, schema: str, *, objects: bool = True, partial: bool = False) -> SchemaScripts:
    """``objects``: also what is in it. ``partial``: views that do not work are kept like the others, since what they
    read may be there where the scripts are loaded. Raises ServerError; NotFoundError when there is no such schema."""
    with plain_session(session) as own:
        collation = own.scalar(_COLLATION, schema)
        if collation is None:
            raise NotFoundError(
                f"there is no schema {schema!r} on the server at {session.connection.address}",
                hint="upper and lower case may differ; SHOW DATABASES lists what the account may see",
            )
        create = str(own.query(f"SHOW CREATE DATABASE IF NOT EXISTS {quote_name(schema)}")[0][1])
        made = f"SET NAMES utf8mb4;\n{create};\n"
        if not objects:
            return SchemaScripts(schema, made)
        own.execute(f"USE {quote_name(schema)}")  # names inside of it are then printed without it
        reader = _Reader(own, schema, str(collation), partial=partial)
        return SchemaScripts(
            schema,
            made,
            views=reader.views(),
            routines=reader.routines(),
            events=reader.events(),
            unread=(*_hidden(own, schema), *reader.unread),
        )


def _hidden(session: Session, schema: str) -> list[str]:
    """What the account would not even see listed."""
    grants = read_grants(session)
    return [
        f"{grants.account} has {lack}: {what} that it may not see are missing here"
        for what, lack in hidden(grants, schema).items()
    ]


class _Reader:
    def __init__(self, session: Session, schema: str, collation: str, *, partial: bool) -> None:
        self._session, self._schema, self._collation, self._partial = session, schema, collation, partial
        self.unread: list[str] = []

    def routines(self) -> str:
        return self._script((kind, name) for kind, name in self._session.query(_ROUTINES, self._schema))

    def events(self) -> str:
        return self._script(("EVENT", name) for (name,) in self._session.query(_EVENTS, self._schema))

    def views(self) -> str:
        listed = {str(name): str(text or "") for name, text in self._session.query(_VIEWS, self._schema)}
        made: list[Stored] = []
        broken: list[str] = []
        for name in _ordered(listed, self._schema):
            one = self._made("VIEW", name)
            if one is None:
                continue
            works = all(int(row[1]) != _INVALID_VIEW for row in self._session.query("SHOW WARNINGS"))
            if not works and not self._partial:
                self.unread.append(
                    f"view {quote_name(name)} does not work: it names tables, columns or functions that "
                    "are not there, or its definer may not read them; it is kept as a comment"
                )
                broken += ["-- " + line for line in one.statement.splitlines()]
            else:
                made.append(one)
        text = script(made, collation=self._collation)
        return text + "\n".join(["-- Views that did not work when they were read:", *broken, ""]) if broken else text

    def _script(self, objects: Iterable[tuple[str, str]]) -> str:
        made = [self._made(str(kind), str(name)) for kind, name in objects]
        return script([one for one in made if one is not None], collation=self._collation)

    def _made(self, kind: str, name: str) -> Stored | None:
        try:
            record = self._session.records(f"SHOW CREATE {kind} {quote_name(name)}")[0]
        except ServerError as error:
            self._session.ping()
            self.unread.append(f"{kind.lower()} {quote_name(name)} cannot be read: {error.detail}")
            return None
        statement = record.get(f"Create {kind.title()}")
        if statement is None:
            self.unread.append(f"{kind.lower()} {quote_name(name)} cannot be read: the account may not see its body")
            return None
        return Stored.from_record(record, str(statement))


def _ordered(definitions: Mapping[str, str], schema: str) -> list[str]:
    """Names of views so that each stands behind those that it reads. Views of other schemas are not looked at."""
    reads = {name: _named(text, schema, definitions.__contains__) - {name} for name, text in definitions.items()}
    ordered: dict[str, None] = {}
    while len(ordered) < len(reads):
        ready = [name for name, of in reads.items() if name not in ordered and of <= ordered.keys()]
        # A column of a table that is named like the schema may look like a view, and close a circle.
        ordered |= dict.fromkeys(ready or [next(name for name in reads if name not in ordered)])
    return list(ordered)


def _named(text: str, schema: str, known: Callable[[str], bool]) -> set[str]:
    words = list(tokens(text))
    found = set()
    for at, token in enumerate(words):
        if token.kind != "name" or not known(token.plain):
            continue
        qualified = at > 1 and words[at - 1].text == "." and words[at - 2].kind == "name"
        if not qualified or words[at - 2].plain == schema:
            found.add(token.plain)
    return found
