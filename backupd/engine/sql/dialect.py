"""Where MySQL, Percona Server and MariaDB differ: one table of statements, and of what a server does and does not do.

MySQL renamed its replication statements (SHOW REPLICA STATUS in 8.0.22, SHOW BINARY LOG STATUS in 8.2, the
old words removed in 8.4); MariaDB keeps the old ones. Session and global values of ``gtid_executed`` differ
before 8.0, so every variable is asked as @@GLOBAL.

A logged statement cut into words, names, texts and marks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from backupd.model.server_facts import Flavour, Version

if TYPE_CHECKING:
    from backupd.engine.sql.client import Session


@dataclass(frozen=True, slots=True)
class Dialect:
    """Statements for one flavour and version.

    ``tablespaces`` yields (name, path, bytes on disk); ``encrypted`` yields names; ``innodb_tables`` is the
    information schema's list of InnoDB tables and their ids; ``uid`` is the variable
    that names this datadir for ever; ``snapshot_status``: the server itself shows the binary log position
    of a snapshot; ``statement_limit``: how a single statement is given a limit in seconds ({seconds},
    {statement}).
    """

    flavour: Flavour
    version: Version
    binlog_status: str
    replica_status: str
    replica_hosts: str
    executed_gtid: str
    uid: str
    tablespaces: str
    encrypted: str
    innodb_tables: str
    snapshot_status: bool
    statement_limit: str = "{statement}"
    session_limit: str = ""
    """Statement that limits each later one of its session ({seconds}, {milliseconds}); empty where there is none."""
    monitor_privilege: str = "REPLICATION CLIENT"
    replica_privilege: str = "REPLICATION CLIENT"
    binlog_session_privilege: str = ""
    backup_privilege: str = ""
    events: str = "information_schema.EVENTS WHERE EVENT_SCHEMA"
    """Where to count events. A server that runs with skip_grant_tables, as a copy of ours may, does not show them in
    the information schema as long as they are kept in a table."""
    forget_replication: str = "RESET REPLICA ALL"
    forget_connection: str = ""
    """Statement that removes one replication connection (its name is the argument); empty where
    ``forget_replication`` removes all of them."""
    stop_replication: str = ""
    """What a client has to say before ``forget_replication``."""
    xa_recover: str = "XA RECOVER CONVERT XID"
    xa_privilege: str = ""
    """What the account needs to list prepared XA transactions."""
    option_files: str = "SELECT DISTINCT VARIABLE_PATH FROM performance_schema.variables_info ORDER BY 1"
    """The option files that the variables came from."""
    components: str = ""
    """The loaded components; empty for servers that have none."""
    renames_locked_tables: bool = False
    """May a session rename tables that it has locked itself?"""
    restores_tables: bool = True
    """Are tables put into such a server? Into older ones only whole backups are restored."""
    has_every_table_in_files: bool = False
    """No table exists by the entry of a dictionary alone."""
    needs_fulltext_files: bool = True
    """Without the files of a full-text index the server ends when it stops."""
    refuses_second_copy: bool = False
    """A tablespace with a DATA DIRECTORY is not opened while the source's own file is there, too (error 1812)."""
    backs_up_replication: bool = True
    """Host and account of a replication connection are in tables, which a physical backup holds."""
    filters_xa: bool = False
    """The applier goes on over XA transactions when it is narrowed down to some tables (else error 3898)."""
    lists_tables_under_lock: bool = False
    """The tables of a physical backup are listed while changes of definitions are blocked. Other tools' are listed
    before the run, and TRUNCATE goes on."""
    keeps_uuid_in_datadir: bool = True
    """A copy of the data directory has the same uuid. MariaDB makes it of a network address and the port."""
    prepare_block: tuple[str, ...] = ()
    block_commits: tuple[str, ...] = ("FLUSH TABLES WITH READ LOCK",)
    """From the first of these on somebody waits: writers of tables without transactions, and with the last of them
    everybody who commits. ``prepare_block`` comes before, ``unblock_commits`` ends it; so does closing the session."""
    unblock_commits: str = "UNLOCK TABLES"
    replay_options: Mapping[str, str] = field(default_factory=dict)
    """What a copy is started with so that it takes logged transactions with GTIDs and without."""
    replay_reader: str = ""
    """Option of the program that prints logs which are replayed by position: GTIDs may come in any order, and twice."""
    replay_session: str = ""
    """What a session says before it executes logged statements, as the server's own applier has it: the source may have
    allowed it where the logs do not say."""

    @property
    def has_events_in_table(self) -> bool:
        """Are scheduled events in ``mysql.event``, rather than in the dictionary?"""
        return self.events.startswith("mysql.event")

    def remove_replication(self, session: Session) -> None:
        """Remove every replication connection of the server. Raises ServerError."""
        if self.forget_connection:
            for row in session.records(self.replica_status):
                session.execute(self.forget_connection, str(row["Connection_name"]))
        session.execute(self.forget_replication)

    def limit(self, session: Session, seconds: float) -> None:
        """End each later statement of ``session`` (on MySQL: each SELECT) after ``seconds``. Raises ServerError."""
        if self.session_limit:
            seconds = max(seconds, 0.001)
            session.execute(self.session_limit.format(seconds=f"{seconds:.3f}", milliseconds=round(seconds * 1000)))

    def limited(self, statement: str, seconds: float) -> str:
        """``statement`` so that the server ends it after ``seconds``, where it can."""
        return self.statement_limit.format(seconds=f"{max(seconds, 0.001):.3f}", statement=statement)


_BACKUP_STAGES: Mapping[str, Any] = {
    # These wait for no SELECT, and until the last one writers of InnoDB go on.
    "prepare_block": ("BACKUP STAGE START", "BACKUP STAGE FLUSH"),
    "block_commits": ("BACKUP STAGE BLOCK_DDL", "BACKUP STAGE BLOCK_COMMIT"),
    "unblock_commits": "BACKUP STAGE END",
}
_KEEPS_HISTORY = "SET SESSION system_versioning_alter_history = KEEP"
_ANY_GTIDS = {"gtid_mode": "OFF_PERMISSIVE", "enforce_gtid_consistency": "OFF", "loose_persisted_globals_load": "OFF"}
_OLD_TABLESPACES = """
SELECT t.NAME, d.PATH, t.ALLOCATED_SIZE FROM information_schema.INNODB_SYS_TABLESPACES t
JOIN information_schema.INNODB_SYS_DATAFILES d ON d.SPACE = t.SPACE
"""
_OLDEST_TABLESPACES = """
SELECT t.NAME, d.PATH, NULL FROM information_schema.INNODB_SYS_TABLESPACES t
JOIN information_schema.INNODB_SYS_DATAFILES d ON d.SPACE = t.SPACE
"""
_NEW_TABLESPACES = """
SELECT t.NAME, d.PATH, t.ALLOCATED_SIZE FROM information_schema.INNODB_TABLESPACES t
JOIN information_schema.INNODB_DATAFILES d ON d.SPACE = t.SPACE
"""


FIRST_FOR_TABLES = Version(5, 7, 6)
"""Of MySQL and Percona Server: see ``Dialect.restores_tables``."""


def dialect_of(flavour: Flavour, version: Version) -> Dialect:
    """What servers of ``flavour`` and ``version`` understand and do."""
    if flavour is Flavour.MARIADB:
        modern = version >= Version(10, 5, 2)
        return Dialect(
            flavour=flavour,
            version=version,
            binlog_status="SHOW MASTER STATUS",
            replica_status="SHOW ALL SLAVES STATUS",
            replica_hosts="SHOW SLAVE HOSTS",
            executed_gtid="SELECT @@GLOBAL.gtid_binlog_pos",
            uid="server_uid",  # since 10.5.26, 10.6.19, 10.11.9
            tablespaces=(
                "SELECT NAME, FILENAME, ALLOCATED_SIZE FROM information_schema.INNODB_SYS_TABLESPACES"
                if version >= Version(10, 6)
                else _OLD_TABLESPACES
            ),
            # Key version 0 means not (yet) encrypted, unless a key rotation is just at work on it.
            encrypted=(
                "SELECT NAME FROM information_schema.INNODB_TABLESPACES_ENCRYPTION "
                "WHERE ENCRYPTION_SCHEME = 1 AND (MIN_KEY_VERSION > 0 OR ROTATING_OR_FLUSHING > 0)"
            ),
            innodb_tables="INNODB_SYS_TABLES",
            snapshot_status=True,
            statement_limit="SET STATEMENT max_statement_time={seconds} FOR {statement}",
            session_limit="SET SESSION max_statement_time = {seconds}",
            monitor_privilege="BINLOG MONITOR" if modern else "REPLICATION CLIENT",
            replica_privilege="SLAVE MONITOR" if version >= Version(10, 5, 9) else "REPLICATION CLIENT",
            binlog_session_privilege="BINLOG ADMIN" if modern else "SUPER",
            events="mysql.event WHERE db",
            forget_replication="RESET SLAVE ALL",
            forget_connection="RESET SLAVE %s ALL",
            stop_replication="STOP ALL SLAVES",
            xa_recover="XA RECOVER FORMAT='SQL'",
            option_files="SELECT DISTINCT GLOBAL_VALUE_PATH FROM information_schema.SYSTEM_VARIABLES ORDER BY 1",
            has_every_table_in_files=True,
            needs_fulltext_files=False,
            backs_up_replication=False,
            filters_xa=True,
            lists_tables_under_lock=True,
            keeps_uuid_in_datadir=False,
            replay_reader="--loose-gtid-strict-mode=0",
            replay_session=_KEEPS_HISTORY if version >= Version(10, 3) else "",
            **(_BACKUP_STAGES if version >= Version(10, 4, 1) else {}),
        )
    dictionary = version >= Version(8, 0)
    return Dialect(
        flavour=flavour,
        version=version,
        binlog_status="SHOW BINARY LOG STATUS" if version >= Version(8, 2) else "SHOW MASTER STATUS",
        replica_status="SHOW REPLICA STATUS" if version >= Version(8, 0, 22) else "SHOW SLAVE STATUS",
        replica_hosts="SHOW REPLICAS" if version >= Version(8, 0, 22) else "SHOW SLAVE HOSTS",
        executed_gtid="SELECT @@GLOBAL.gtid_executed",
        uid="server_uuid",
        tablespaces=(
            _NEW_TABLESPACES
            if dictionary
            else _OLD_TABLESPACES
            if version >= Version(5, 7, 8)
            else _OLDEST_TABLESPACES  # reports no sizes
        ),
        encrypted=(
            "SELECT NAME FROM information_schema.INNODB_TABLESPACES WHERE ENCRYPTION = 'Y'"
            if dictionary
            else "SELECT CONCAT(TABLE_SCHEMA, '/', TABLE_NAME) FROM information_schema.TABLES "
            "WHERE CREATE_OPTIONS LIKE '%ENCRYPTION=\"Y\"%'"
        ),
        innodb_tables="INNODB_TABLES" if dictionary else "INNODB_SYS_TABLES",
        # Percona Server has MariaDB's status variables; they are looked for where they may be.
        snapshot_status=flavour is Flavour.PERCONA,
        backup_privilege="BACKUP_ADMIN" if dictionary else "",
        session_limit="SET SESSION max_execution_time = {milliseconds}" if version >= Version(5, 7, 8) else "",
        events="information_schema.EVENTS WHERE EVENT_SCHEMA" if dictionary else "mysql.event WHERE db",
        forget_replication="RESET REPLICA ALL" if version >= Version(8, 0, 22) else "RESET SLAVE ALL",
        xa_privilege="XA_RECOVER_ADMIN" if dictionary else "",
        components="SELECT 'component', component_urn FROM mysql.component ORDER BY 2" if dictionary else "",
        renames_locked_tables=version >= Version(8, 0, 13),
        restores_tables=version >= FIRST_FOR_TABLES,
        refuses_second_copy=not dictionary,
        replay_options=_ANY_GTIDS,
    )


def pipes_everything(flavour: str) -> bool:
    """Can one client session replay XA transactions, and can single transactions be left out of it?"""
    return flavour != Flavour.MARIADB


TOKEN = re.compile(
    r"""\s+ | --(?=\s)[^\n]* | \#[^\n]* | /\*M?!\d* | /\*.*?(?:\*/|\Z) | \*/
      | (?P<quoted>`(?:[^`]++|``)*+`) | (?P<text>'(?:[^'\\]++|\\.|'')*+'?) | (?P<double>"(?:[^"\\]++|\\.|"")*+"?)
      | (?P<word>[\w$\u0080-\uffff]+) | (?P<mark>.)""",
    re.VERBOSE | re.DOTALL,
)


class Token(NamedTuple):
    """``kind``: name (quoted), text (a string), word or mark. ``start`` and ``end``: its span in the text."""

    kind: str
    text: str
    start: int
    end: int

    @property
    def word(self) -> str:
        """In upper case, a mark as it is; empty for what is quoted."""
        return self.text.upper() if self.kind in {"word", "mark"} else ""

    @property
    def plain(self) -> str:
        """A name without its quotes, whatever else as it is."""
        quote = self.text[0]
        return self.text[1:-1].replace(quote * 2, quote) if self.kind == "name" else self.text

    @property
    def may_name(self) -> bool:
        """May it be a name?"""
        return self.kind in {"name", "word"}


def tokens_of(text: str) -> Iterator[Token]:
    """Everything but white space and comments; versioned comments are read, as the server does."""
    for match in TOKEN.finditer(text):
        if (kind := match.lastgroup) is not None:
            yield Token("name" if kind in {"quoted", "double"} else kind, match.group(), *match.span())


def word_at(tokens: list[Token], at: int) -> str:
    """The word of the token at ``at``, empty behind the last one."""
    return tokens[at].word if at < len(tokens) else ""


def outside(tokens: Sequence[Token]) -> Iterator[tuple[int, Token]]:
    """Those that are not inside of parentheses, each with its index."""
    depth = 0
    for at, token in enumerate(tokens):
        depth -= token.word == ")"
        if depth == 0:
            yield at, token
        depth += token.word == "("


def full_name(tokens: list[Token], at: int, schema: str) -> tuple[tuple[str, str], int]:
    """The name that begins at ``at``, and where what follows it begins."""
    if at + 2 < len(tokens) and tokens[at + 1].word == "." and tokens[at + 2].may_name:
        return (tokens[at].plain, tokens[at + 2].plain), at + 3
    return (schema, tokens[at].plain), at + 1


def after_account(tokens: list[Token], at: int) -> int:
    """Behind ``= user@host`` or ``= CURRENT_USER()``."""
    while word_at(tokens, at) == "=":
        at += 1
    at += 1
    while (word := word_at(tokens, at)) in {"@", "(", ")"}:
        at += 2 if word == "@" else 1
    return at
