"""Privileges of the account that backupd uses: what it may do (SHOW GRANTS), what it needs, and what it would not even
see, because a server leaves that out of its lists without a word.

A role counts only while it is active: a granted role that is not a default role gives a service nothing.

Users, roles and grants of a server as SQL that can be replayed on another one.

The server's own answers (SHOW CREATE USER, SHOW GRANTS) are not yet such SQL:

* MariaDB expands the roles inside a role, and names only those who hold a role, not what its maker gets for making it;
* MySQL does not escape what is in REQUIRE SUBJECT and in hashes, leaves out the second password of an account,
  and expires the password of an existing account that is altered to a plugin without a hash;
* a default role must be granted first, or be mandatory already; MySQL *grants* one that CREATE USER names as default;
* grants on tables, columns and routines are refused until those exist.

So the statements are taken apart, and put in an order that works on an empty server: roles and accounts, memberships,
privileges, default roles, and last what needs objects. Everything may be replayed twice.

The text holds password hashes: it is for memory and for sealed objects only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from backupd.engine.sql.client import Session, error_code, is_denied
from backupd.engine.sql.dialect import Dialect
from backupd.model.errors import ServerError
from backupd.model.server_facts import Flavour, Version
from backupd.model.table import TableName, TablePattern, quote_name
from backupd.model.text import few

_GRANT = re.compile(
    r"(?P<verb>GRANT|REVOKE) (?P<names>.+?) ON (?:\*\.\*|`(?P<schema>(?:[^`]|``)*)`\.(?:\*|`(?P<table>(?:[^`]|``)*)`))"
    r" (?:TO|FROM) ",
    re.IGNORECASE,
)
_OF_COLUMNS = re.compile(r"[\w ]+\([^)]*\)")
_LIKE = re.compile(r"\\(.)|(%)|(_)|(.)", re.DOTALL)
_NO_GRANT_TABLES = 1290
_ROLE = re.compile(r"GRANT (?P<roles>[`'\"].+?) TO ", re.IGNORECASE)

_SYNONYMS = {
    "BINLOG MONITOR": "REPLICATION CLIENT",
    "REPLICA MONITOR": "SLAVE MONITOR",
    "REPLICATION REPLICA": "REPLICATION SLAVE",
}
_EVERYTHING = "ALL PRIVILEGES"


@dataclass(frozen=True, slots=True)
class Need:
    """A privilege on ``*.*``; ``required`` for taking a backup at all, else ``purpose`` says what is lost."""

    privilege: str
    purpose: str
    required: bool


@dataclass(frozen=True, slots=True)
class Grants:
    """``everywhere``: privileges on *.* that are active now; ``roles``: granted roles, active or not. ``schemas``:
    privileges by pattern of schemas, as LIKE has them; ``tables``: by schema and table; ``revoked``: those on *.* that
    do not hold in a schema."""

    account: str
    everywhere: frozenset[str]
    roles: tuple[str, ...]
    schemas: tuple[tuple[str, frozenset[str]], ...] = ()
    tables: Mapping[tuple[str, str], frozenset[str]] = field(default_factory=dict)
    revoked: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def allow(self, privilege: str, schema: str = "", table: str = "") -> bool:
        """On *.*; with ``schema`` (which may have ``*`` in it) on all of it, with ``table`` on that one."""
        wanted = _plain(privilege)
        if wanted not in self.revoked.get(schema, ()) and _holds(self.everywhere, wanted):
            return True
        if any(_holds(names, wanted) and _is_like(schema, pattern) for pattern, names in self.schemas):
            return True
        return _holds(self.tables.get((schema, table), frozenset()), wanted)


def needs(dialect: Dialect, *, binlog: bool = False, physical: bool = True, rocksdb: bool = False) -> tuple[Need, ...]:
    """What a backup, the probe and the witness need; with ``binlog`` also a stream of the binary log. ``physical``
    False: only dumps are taken. ``rocksdb``: is that engine loaded?

    mariadb-backup: RELOAD, PROCESS, LOCK TABLES, BINLOG MONITOR (its page "Authentication and Privileges");
    XtraBackup 8: BACKUP_ADMIN, PROCESS, RELOAD, LOCK TABLES, REPLICATION CLIENT (its page "Privileges
    needed"). Whoever reads a binary log over the wire needs REPLICATION SLAVE, and to list the logs what the tool
    needs for positions.
    """
    tool = "the physical backup tool stops without it"
    required = dict.fromkeys(
        ("RELOAD", "PROCESS", "LOCK TABLES", dialect.monitor_privilege, dialect.backup_privilege), tool
    )
    if not physical:
        required = {
            "RELOAD": "a dump cannot block commits for the moment in which it begins, so every dump fails",
            "PROCESS": "the server's tablespaces and running statements cannot be read, so every dump fails",
            dialect.monitor_privilege: "the position in the binary log cannot be read, so every dump fails",
        }
    elif rocksdb and dialect.flavour is Flavour.MARIADB:
        required["SUPER"] = (
            "the engine ROCKSDB is loaded, of which the physical backup tool makes a checkpoint (SET "
            "GLOBAL rocksdb_create_checkpoint): every physical backup fails without it"
        )
    wanted = {
        "SELECT": "no witness can be read, so a restore is not proved equal, and engines in use stay unknown",
        "SHOW VIEW": "views are not counted, so a restore is not checked for them",
        "TRIGGER": "triggers are not counted, so a restore is not checked for them",
        "EVENT": "events are not counted, so a restore is not checked for them",
        dialect.replica_privilege: "a stopped replica is not recognised as one",
        dialect.binlog_session_privilege: "ALTER TABLE waits while a witness is read, for 60 s at most",
    }
    return (
        *(Need(name, why, required=True) for name, why in required.items() if name),
        *([Need("REPLICATION SLAVE", "the binary log cannot be streamed", required=True)] if binlog else []),
        *(Need(name, why, required=False) for name, why in wanted.items() if name and name not in required),
    )


def read_grants(session: Session) -> Grants:
    """Of the account that the session logged in as. Raises ServerError."""
    account = str(session.scalar("SELECT CURRENT_USER()"))
    try:
        lines = [str(row[0]) for row in session.query("SHOW GRANTS")]
    except ServerError as error:
        if error_code(error) != _NO_GRANT_TABLES:
            raise
        return Grants(account, frozenset({_EVERYTHING}), ())  # everybody may do everything there
    active = session.scalar("SELECT CURRENT_ROLE()") if _has_roles(session) else None
    if active not in (None, "NONE", "") and "mariadb" not in session.greeting.lower():
        # MySQL lists what roles give only when asked with USING; MariaDB lists it by itself.
        lines += [str(row[0]) for row in session.query(f"SHOW GRANTS FOR CURRENT_USER() USING {active}")]
    return parse_grants(account, lines)


def parse_grants(account: str, lines: Sequence[str]) -> Grants:
    """Read the lines of SHOW GRANTS; they hold password hashes, so they are not kept."""
    everywhere: set[str] = set()
    schemas: list[tuple[str, frozenset[str]]] = []
    tables: dict[tuple[str, str], frozenset[str]] = {}
    revoked: dict[str, frozenset[str]] = {}
    roles: list[str] = []
    for line in lines:
        if found := _GRANT.match(line):
            names = frozenset(_plain(name) for name in _OF_COLUMNS.sub("", found["names"]).split(",")) - {""}
            schema, table = ((half or "").replace("``", "`") for half in (found["schema"], found["table"]))
            if found["verb"].upper() == "REVOKE":
                revoked[schema] = revoked.get(schema, frozenset()) | names
            elif not schema:
                everywhere |= names
            elif not table:
                schemas.append((schema, names))
            else:
                tables[schema, table] = tables.get((schema, table), frozenset()) | names
        elif (role := _ROLE.match(line)) and " ON " not in role["roles"]:
            roles += [name.strip() for name in role["roles"].split(",")]
    return Grants(account, frozenset(everywhere), tuple(roles), tuple(schemas), tables, revoked)


def _has_roles(session: Session) -> bool:
    greeting = session.greeting.removeprefix("5.5.5-").lower()
    return "mariadb" in greeting or not greeting.startswith(("5.", "4."))


def _holds(names: frozenset[str], wanted: str) -> bool:
    return _EVERYTHING in names or wanted in names


def _is_like(schema: str, pattern: str) -> bool:
    """``*`` in ``schema`` stands for any text, which one character of ``pattern`` is not enough for."""
    parts = (
        re.escape(escaped or plain) if escaped or plain else ".*" if anything else "[^*]"
        for escaped, anything, _one, plain in _LIKE.findall(pattern)
    )
    return re.fullmatch("".join(parts), schema, re.DOTALL) is not None


def _plain(privilege: str) -> str:
    name = " ".join(privilege.upper().replace("_", " ").split())
    return _SYNONYMS.get(name, name)


_OPEN_TO = {"views": "SHOW VIEW", "triggers": "TRIGGER", "events": "EVENT"}
_SHOWING_ROUTINES = ("EXECUTE", "CREATE ROUTINE", "ALTER ROUTINE", "SHOW CREATE ROUTINE")
_SHOWN = 10
_PROBE = "SELECT 1 FROM {table} LIMIT 0"


def hidden(grants: Grants, schema: str) -> Mapping[str, str]:
    """Kinds of objects of ``schema`` that the account may not see all of, each with what it lacks for that."""
    found = {
        what: f"no {privilege} privilege on *.*, nor on this schema"
        for what, privilege in _OPEN_TO.items()
        if not grants.allow(privilege, schema)
    }
    if not (
        grants.allow("SELECT")
        or grants.allow("SHOW_ROUTINE")
        or grants.allow("SELECT", "mysql", "proc")
        or any(grants.allow(privilege, schema) for privilege in _SHOWING_ROUTINES)
    ):
        found["routines"] = (
            "no privilege that shows those of others (SHOW_ROUTINE in MySQL, SELECT on mysql.proc in MariaDB)"
        )
    return found


def unseen(grants: Grants, include: Sequence[TablePattern]) -> Iterator[str]:
    """Sentences about those of ``include`` that ask for more than the account may see. A pattern that names one table
    is none of them: that it fits nothing is reported anyway."""
    account = grants.account
    for schema in sorted(grants.revoked):
        if not grants.allow("SELECT", schema) and any(pattern.reaches(schema) for pattern in include):
            yield (
                f"{account} has no SELECT privilege on schema {schema} (it is revoked there): its tables cannot be "
                "dumped, and the hidden ones are not listed"
            )
    if grants.allow("SELECT"):
        return
    may = sorted(pattern for pattern, _names in grants.schemas if grants.allow("SELECT", pattern.replace("\\", "")))
    readable = few(may, _SHOWN)
    for pattern in include:
        if pattern.table is None and not grants.allow("SELECT", pattern.schema):
            yield (
                f"{account} has no SELECT privilege on *.*, and {pattern} asks for more than the schemas that it may "
                f"read ({readable or 'none'}): tables that it cannot see are missing without a warning"
            )


def unreadable(session: Session, grants: Grants, names: Iterable[TableName]) -> dict[TableName, str]:
    """Those of ``names`` that the account may not read, in words that name the privilege. Raises ServerError."""
    found = {}
    for name in names:
        if grants.allow("SELECT", name.schema, name.table):
            continue
        try:  # the server's word counts, not our reading of its grants
            session.query(_PROBE.format(table=name))
        except ServerError as error:
            if is_denied(error):
                found[name] = f"{grants.account} has no SELECT privilege on it"
            session.ping()
    return found


_NAME = r"`(?:[^`]|``)*`"
_TEXT = r"'(?:[^'\\]|\\.|'')*'"
_GRANT_STATEMENT = re.compile(
    rf"(?P<verb>GRANT|REVOKE) (?P<privileges>(?:[^`]|{_NAME})+?) ON "
    rf"(?P<object>\*\.\*|{_NAME}\.\*|{_NAME}@{_NAME}|{_TEXT}@{_TEXT}|(?:[A-Z]+ )*{_NAME}\.{_NAME}) "
    r"(?:TO|FROM) (?P<rest>.*)",
    re.DOTALL,
)
_ON_SERVER_OR_SCHEMA = re.compile(rf"\*\.\*|{_NAME}\.\*", re.DOTALL)
_DEFAULT_ROLE = re.compile(rf" DEFAULT ROLE (?:{_NAME}@{_NAME},?)+")
_PLUGIN = re.compile(rf" IDENTIFIED WITH '(?P<plugin>[^']*)'(?: AS (?:0x[0-9A-F]*|{_TEXT}))?", re.DOTALL)
_VIA = re.compile(r"\b(?:VIA|OR) (\w+)")

_SYSTEM = frozenset({"mysql.sys", "mysql.session", "mysql.infoschema", "mariadb.sys"})
"""Every server has its own of these."""
_NATIVE = "mysql_native_password"
_PUBLIC = "PUBLIC"
_HEAD = """\
-- Users, roles and grants of a {flavour} {version} server, for an empty server of the same series.
-- Replay as an account that may do everything: mariadb --force < accounts.sql (or mysql --force).
-- The last part needs the tables and routines that it names; replay the whole file again once they exist.
"""


@dataclass(frozen=True, slots=True)
class Accounts:
    """``sql``: the whole script; ``problems``: sentences about what could not be read, without secrets."""

    sql: str
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Account:
    """``me``: as it is in our statements. ``forms``: how versions of the server write it in theirs."""

    user: str
    host: str
    me: str
    forms: tuple[str, ...]

    @classmethod
    def of(cls, user: str, host: str) -> _Account:
        me = _of(user, host)
        return cls(user, host, me, (me, f"{quote_text(user)}@{quote_text(host)}", f"'{user}'@'{host}'"))

    @classmethod
    def role(cls, name: str) -> _Account:
        me = _PUBLIC if name == _PUBLIC else quote_name(name)
        return cls(name, "", me, (quote_name(name), me))

    def after(self, text: str) -> str | None:
        """What follows this account at the beginning of ``text``; None when it does not begin so."""
        for form in self.forms:
            if text.startswith(form) and text[len(form) : len(form) + 1] in ("", " "):
                return text[len(form) :]
        return None


@dataclass(slots=True)
class _Script:
    """Statements by the moment at which they can run."""

    accounts: list[str] = field(default_factory=list)
    members: list[str] = field(default_factory=list)
    privileges: list[str] = field(default_factory=list)
    proxies: list[str] = field(default_factory=list)
    defaults: list[str] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    on_objects: list[str] = field(default_factory=list)
    before: list[str] = field(default_factory=list)
    plugins: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)

    def render(self, flavour: Flavour, version: Version) -> str:
        parts = [_HEAD.format(flavour=flavour, version=version)]
        if self.plugins:
            parts.append(f"-- Plugins that must be active first: {', '.join(sorted(self.plugins))}\n")
        parts += [f"-- Not complete: {' '.join(problem.split())}\n" for problem in self.problems]
        parts.append("SET SESSION sql_mode = '';\nSET NAMES utf8mb4;\n")
        for title, statements in (
            ("", self.before),
            ("Accounts and roles", self.accounts),
            ("Who has which role", self.members),
            ("Privileges", self.privileges),
            ("Proxies", self.proxies),
            ("Default roles", self.defaults),
            ("What whoever replays this got by making the roles", self.ends),
            ("Privileges on tables, columns and routines, which must exist", self.on_objects),
        ):
            if statements:
                heading = f"\n-- {title}\n" if title else ""
                parts.append(heading + "".join(f"{statement};\n" for statement in statements))
        return "".join(parts)

    def grant(self, line: str, account: _Account, *, keep_tail: bool = False) -> None:
        """Take one line of SHOW GRANTS; those about others and memberships, which come from tables, are dropped."""
        found = _GRANT_STATEMENT.fullmatch(line)
        tail = account.after(found["rest"]) if found else None
        if found is None or tail is None:
            return
        may_grant = "GRANT OPTION" in _masked(tail)
        on_all = found["object"] == "*.*"
        if found["privileges"] == "USAGE" and on_all and not may_grant and not keep_tail:
            return
        if not (keep_tail and on_all):
            tail = " WITH GRANT OPTION" if may_grant else ""
        word = "TO" if found["verb"] == "GRANT" else "FROM"
        statement = f"{found['verb']} {found['privileges']} ON {found['object']} {word} {account.me}{tail}"
        if found["privileges"] == "PROXY":
            self.proxies.append(statement)
        elif _ON_SERVER_OR_SCHEMA.fullmatch(found["object"]):
            self.privileges.append(statement)
        else:
            self.on_objects.append(statement)


def read_accounts(session: Session, flavour: Flavour, version: Version) -> Accounts:
    """Ask for everything; changes the session's sql_mode. What the account may not see is reported in ``problems``.

    Raises ServerError when the server goes away.
    """
    script = _Script()
    session.execute("SET SESSION sql_mode = ''")
    session.execute("SET SESSION sql_quote_show_create = 1")
    try:
        if flavour is Flavour.MARIADB:
            _mariadb(session, version, script)
        else:
            _mysql(session, version, script)
    except ServerError as error:
        if not is_denied(error):
            raise
        script.problems.append(f"users and grants cannot be read: {error.detail}")
    return Accounts(script.render(flavour, version), tuple(script.problems))


def quote_text(text: str) -> str:
    """``text`` as a string literal for sql_mode ''."""
    escapes = {"\\": "\\\\", "'": "\\'", "\0": "\\0", "\n": "\\n", "\r": "\\r", "\x1a": "\\Z"}
    return "'" + "".join(escapes.get(letter, letter) for letter in text) + "'"


# MariaDB


def _mariadb(session: Session, version: Version, script: _Script) -> None:
    if version >= Version(10, 4):
        listed = session.query("SELECT User, Host, COALESCE(JSON_VALUE(Priv, '$.is_role'), 0) FROM mysql.global_priv")
    else:
        listed = session.query("SELECT User, Host, is_role = 'Y' FROM mysql.user")
    rows = sorted((str(user), str(host), str(role) in ("1", "true")) for user, host, role in listed)
    roles = [_Account.role(user) for user, _, is_role in rows if is_role]
    users = [_Account.of(user, host) for user, host, is_role in rows if not is_role and user not in _SYSTEM]
    script.accounts += [f"CREATE OR REPLACE ROLE {role.me}" for role in roles if role.user != _PUBLIC]
    for account in users:
        for line in _ask(session, f"SHOW CREATE USER {account.me}", account, script):
            tail = account.after(line.removeprefix("CREATE USER "))
            if tail is None:
                script.problems.append(f"the account {account.me} cannot be parsed")
                continue
            script.plugins |= set(_VIA.findall(_masked(tail))) - {_NATIVE}
            tail = _mariadb_clauses(tail, lockable=version >= Version(10, 4, 2))
            script.accounts += [f"CREATE USER IF NOT EXISTS {account.me}{tail}", f"ALTER USER {account.me}{tail}"]
    held: dict[str, dict[str, bool]] = {role.user: {} for role in roles}
    for host, user, role, admin in session.query(
        "SELECT Host, User, Role, Admin_option FROM mysql.roles_mapping ORDER BY Role, User, Host"
    ):
        holder = _Account.of(str(user), str(host)) if host else _Account.role(str(user))
        option = " WITH ADMIN OPTION" if admin == "Y" else ""
        script.members.append(f"GRANT {quote_name(str(role))} TO {holder.me}{option}")
        held.setdefault(str(role), {})[f"{user}@{host}"] = admin == "Y"
    script.ends += [_end_of_making(role, holders) for role, holders in held.items() if role != _PUBLIC]
    for account in (*roles, *users):
        for line in _ask(session, f"SHOW GRANTS FOR {account.me}", account, script):
            if line.startswith("SET DEFAULT ROLE ") and account.host:
                script.defaults.append(line)
            else:
                script.grant(line, account)


def _mariadb_clauses(tail: str, *, lockable: bool) -> str:
    """Say what MariaDB leaves out because it is the default, so that ALTER USER brings an account there, too."""
    if " IDENTIFIED " not in _masked(tail):
        tail = " IDENTIFIED VIA mysql_native_password USING ''" + tail
    if " REQUIRE " not in _masked(tail):
        tail = _inserted(tail, " REQUIRE NONE", (" WITH ", " ACCOUNT LOCK", " PASSWORD EXPIRE"))
    if lockable and " ACCOUNT LOCK" not in _masked(tail):
        tail = _inserted(tail, " ACCOUNT UNLOCK", (" PASSWORD EXPIRE",))
    return tail


def _inserted(tail: str, clause: str, before: Sequence[str]) -> str:
    hidden = _masked(tail)
    index = min((hidden.find(word) for word in before if word in hidden), default=len(tail))
    return tail[:index] + clause + tail[index:]


def _end_of_making(role: str, holders: Mapping[str, bool]) -> str:
    """Whoever makes a role becomes its administrator; this takes that back, unless the source has it so."""
    cases = ""
    for admin, statement in ((True, "DO 0"), (False, f"REVOKE ADMIN OPTION FOR {quote_name(role)} FROM CURRENT_USER")):
        if names := sorted(quote_text(name) for name, is_admin in holders.items() if is_admin is admin):
            cases += f" WHEN CURRENT_USER() IN ({', '.join(names)}) THEN {quote_text(statement)}"
    revoke = quote_text(f"REVOKE {quote_name(role)} FROM CURRENT_USER")
    return f"EXECUTE IMMEDIATE {f'CASE{cases} ELSE {revoke} END' if cases else revoke}"


# MySQL

_USERS = """
SELECT User, Host, plugin, HEX(authentication_string), CAST(ssl_cipher AS CHAR), CAST(x509_issuer AS CHAR),
       CAST(x509_subject AS CHAR){more} FROM mysql.user
"""
_SECOND = ", HEX(JSON_UNQUOTE(JSON_EXTRACT(User_attributes, '$.additional_password')))"


@dataclass(frozen=True, slots=True)
class _Row:
    plugin: str
    secret: bytes
    required: Mapping[str, str]
    second: bytes

    def identified(self, secret: bytes, *, hexadecimal: bool) -> str:
        """The clause that gives an account this plugin and ``secret``."""
        text = quote_text(secret.decode("utf-8", "surrogateescape"))
        written = f"0x{secret.hex().upper()}" if hexadecimal and secret else text
        return f" IDENTIFIED WITH {quote_text(self.plugin)} AS {written}"


def _mysql(session: Session, version: Version, script: _Script) -> None:
    with_roles, hexadecimal = version >= Version(8, 0), version >= Version(8, 0, 17)
    if hexadecimal:
        session.execute("SET SESSION print_identified_with_as_hex = 1")
    found: list[tuple[_Account, _Row]] = []
    for user, host, plugin, secret, cipher, issuer, subject, *second in session.query(
        _USERS.format(more=_SECOND if with_roles else "")
    ):
        if user not in _SYSTEM:
            row = _Row(
                str(plugin or ""),
                bytes.fromhex(str(secret or "")),
                {"CIPHER": str(cipher or ""), "ISSUER": str(issuer or ""), "SUBJECT": str(subject or "")},
                bytes.fromhex(str(second[0] or "")) if second else b"",
            )
            found.append((_Account.of(str(user), str(host)), row))
    found.sort(key=lambda pair: (pair[0].user, pair[0].host))
    for account, row in found:
        if version < Version(5, 7):
            if row.plugin not in ("", _NATIVE, "mysql_old_password"):
                script.accounts.append(f"CREATE USER {account.me}{row.identified(row.secret, hexadecimal=False)}")
        else:
            for line in _ask(session, f"SHOW CREATE USER {account.me}", account, script):
                script.accounts += _mysql_account(account, row, line, script, hexadecimal=hexadecimal)
    if with_roles:
        _mysql_roles(session, script)
    for account, row in found:
        for line in _ask(session, f"SHOW GRANTS FOR {account.me}", account, script):
            script.grant(line, account, keep_tail=version < Version(5, 7) and row.plugin in ("", _NATIVE))


def _mysql_account(account: _Account, row: _Row, line: str, script: _Script, *, hexadecimal: bool) -> Iterator[str]:
    tail = account.after(line.removeprefix("CREATE USER "))
    if tail is None:
        script.problems.append(f"the account {account.me} cannot be parsed")
        return
    if row.plugin not in (_NATIVE, "caching_sha2_password", "sha256_password"):
        script.plugins.add(row.plugin)
    # Hashes hold any byte: what the server printed is cut out as it is and written anew.
    raw = f" AS '{row.secret.decode('utf-8', 'surrogateescape')}'"
    tail = tail.replace(raw, "", 1) if row.secret else tail
    for word, value in row.required.items():
        if value:
            tail = tail.replace(f" {word} '{value}'", f" {word} {quote_text(value)}", 1)
    tail = _DEFAULT_ROLE.sub("", tail, count=1)

    written = row.identified(row.second or row.secret, hexadecimal=hexadecimal)
    first = _PLUGIN.sub(lambda _: written, tail, count=1)
    yield f"CREATE USER IF NOT EXISTS {account.me}{first}"
    yield f"ALTER USER {account.me}{first}"
    if row.second:
        yield f"ALTER USER {account.me}{row.identified(row.secret, hexadecimal=hexadecimal)} RETAIN CURRENT PASSWORD"


def _mysql_roles(session: Session, script: _Script) -> None:
    for from_user, from_host, to_user, to_host, admin in session.query(
        "SELECT FROM_USER, FROM_HOST, TO_USER, TO_HOST, WITH_ADMIN_OPTION FROM mysql.role_edges "
        "ORDER BY TO_USER, TO_HOST, FROM_USER, FROM_HOST"
    ):
        option = " WITH ADMIN OPTION" if admin == "Y" else ""
        script.members.append(f"GRANT {_of(from_user, from_host)} TO {_of(to_user, to_host)}{option}")
    mandatory = str(session.scalar("SELECT @@GLOBAL.mandatory_roles") or "")
    if mandatory:
        script.defaults.append(f"SET GLOBAL mandatory_roles = {quote_text(mandatory)}")
    defaults: dict[str, list[str]] = {}
    for user, host, role, role_host in session.query(
        "SELECT USER, HOST, DEFAULT_ROLE_USER, DEFAULT_ROLE_HOST FROM mysql.default_roles "
        "ORDER BY USER, HOST, DEFAULT_ROLE_USER, DEFAULT_ROLE_HOST"
    ):
        defaults.setdefault(_of(user, host), []).append(_of(role, role_host))
    script.defaults += [f"ALTER USER {account} DEFAULT ROLE {', '.join(roles)}" for account, roles in defaults.items()]
    if session.variables("partial_revokes").get("partial_revokes", "").upper() in ("ON", "1"):  # since 8.0.16
        script.before.append("SET GLOBAL partial_revokes = ON")


def _of(user: object, host: object) -> str:
    return f"{quote_name(str(user))}@{quote_name(str(host))}"


# Both


def _ask(session: Session, statement: str, account: _Account, script: _Script) -> Iterable[str]:
    """The lines of an answer. A single account that the server refuses to show is reported and left out."""
    try:
        lines = [str(row[0]) for row in session.query(statement)]
    except ServerError as error:
        session.ping()
        script.problems.append(f"the account {account.me} is not complete: {error.detail}")
        return ()
    if any("<secret>" in line for line in lines):
        script.problems.append(f"the server hides the password hash of {account.me}: grant SELECT on mysql.*")
    return lines


def _masked(text: str) -> str:
    """``text`` with string literals blanked out, of the same length."""
    return re.sub(_TEXT, lambda found: " " * len(found.group()), text, flags=re.DOTALL)
