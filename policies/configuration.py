"""What the configuration says about the REST interface and the web page.

The configuration file of the service: servers, destinations, keys, and how to thaw what is in archive classes and
what that costs.
"""

from __future__ import annotations

import ipaddress
import re
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, WithJsonSchema, model_validator

from policies.alerts import Alerts
from policies.archive_classes import Archive
from policies.fields import (
    BASE,
    KEPT_IN_FILE,
    Duration,
    LocalPath,
    Name,
    Percent,
    Section,
    Size,
    TimeZone,
    Words,
    has_password,
    local_path,
    optional,
    section,
    written,
)
from storage.config import FilesystemConfig, S3Config, SftpConfig

if TYPE_CHECKING:
    pass

_LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_NAME = re.compile(rf"({_LABEL}\.)*(?!([0-9]+|0[xX][0-9A-Fa-f]*)\Z){_LABEL}")
"""A host's. What ends in a number is an address or nothing: ``0`` and ``0x7f.1`` are addresses for the system only."""


def _listen(text: str) -> str:
    host, found, port = text.rpartition(":")
    if not found or not _is_host(host) or not port.isascii() or not port.isdigit() or not 0 < int(port[:6]) < 65536:
        raise ValueError("must be ADDRESS:PORT, as in 127.0.0.1:8642 or [::1]:8642")
    return text


def _is_host(host: str) -> bool:
    try:
        if host.startswith("[") and host.endswith("]"):
            return bool(ipaddress.IPv6Address(host[1:-1]))
        return _NAME.fullmatch(host) is not None or bool(ipaddress.IPv4Address(host))
    except ValueError:
        return False


def is_loopback(host: str) -> bool:
    """Can only this host connect there?"""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_everywhere(host: str) -> bool:
    """Does it mean every address of this host, so that nobody can go there?"""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


MAX_LABELS = 64
"""Of one server."""
MAX_MEMBERS = 64
"""Of one group."""


class Tls(Section):
    """The certificate of the REST interface and the web page."""

    certificate: LocalPath = Field(
        description="The certificate, with what is between it and its root, as PEM.", examples=["/etc/backupd/tls.pem"]
    )
    key: LocalPath = Field(
        description="Its private key, as PEM, without a passphrase.", examples=["/etc/backupd/tls.key"]
    )


class Api(Section):
    """The REST interface and the web page."""

    enabled: bool = Field(True, description="Whether the service offers them.", examples=[False])
    listen: Annotated[str, AfterValidator(_listen)] = Field(
        "127.0.0.1:8642", description="Address and port to listen on.", examples=["127.0.0.1:8642"]
    )
    tls: Tls | None = optional(
        description="Without it connections are not encrypted; `check` warns if other hosts can connect.",
    )
    url: Words | None = optional(
        description="The address that people reach it at, for the links in mails; by "
        "default made of listen, with this host's name where that is every "
        "address. With https:// the page's cookies are of TLS "
        "alone.",
        examples=["https://backup.example.com"],
    )
    metrics: Literal["auto", "open", "token"] = Field(
        "auto",
        examples=["token"],
        description="Who may read /metrics: anybody who can connect, or holders of a token; `auto` requires a token "
        "if other hosts can connect (through `listen` or `url`).",
    )
    session: Duration = written("12h", description="How long somebody stays logged in to the web page.")

    @property
    def host(self) -> str:
        """That of ``listen``."""
        return self.listen.rpartition(":")[0].strip("[]").lower()

    @property
    def is_private(self) -> bool:
        """Does nobody but this host reach it, as far as this says?"""
        named = urlsplit(self.url).hostname if self.url else None
        return is_loopback(self.host) and (named is None or is_loopback(named.lower()))


def _catalog(text: object, info: ValidationInfo) -> str:
    if not isinstance(text, str):
        raise ValueError("must be a URL: sqlite:////PATH or postgresql://USER@HOST/NAME")  # noqa: TRY004  pydantic collects ValueError only
    scheme, found, rest = text.partition("://")
    if not found or scheme not in {"sqlite", "postgresql", "postgres", "postgresql+psycopg"}:
        raise ValueError(
            "must begin with sqlite:/// or postgresql://; an SQLite file is written "
            "sqlite:////var/lib/backupd/catalog.db"
        )
    if scheme == "sqlite":
        if not rest.startswith("/") or rest == "/" or rest.startswith("/:memory:"):
            raise ValueError("needs the path of a file: sqlite:////var/lib/backupd/catalog.db")
        context = info.context
        return f"sqlite:///{local_path(rest[1:], context.get(BASE) if isinstance(context, dict) else None)}"
    if has_password(text):
        raise ValueError(
            "secrets stay out of this file: name a password file with ?passfile=/etc/backupd/pgpass "
            "(https://www.postgresql.org/docs/current/libpq-pgpass.html)"
        )
    return text


def _fingerprint(text: str) -> str:
    digits = text.replace(" ", "").upper()
    if not re.fullmatch(r"[0-9A-F]{40}(?:[0-9A-F]{24})?", digits):
        raise ValueError(f"{text[:80]!r} is not a full fingerprint: gpg --list-keys shows it, 40 hexadecimal digits")
    return digits


Fingerprint = Annotated[str, AfterValidator(_fingerprint), WithJsonSchema({"type": "string", "format": "fingerprint"})]
CatalogUrl = Annotated[str, BeforeValidator(_catalog), WithJsonSchema({"type": "string", "format": "URL"})]


REACH = frozenset(
    {
        "socket",
        "host",
        "port",
        "tls",
        "tls_ca",
        "user",
        "defaults_file",
        "password_file",
        "password_env",
        "restore_defaults_file",
        "server_defaults_file",
    }
)
"""Fields of a server that say how to reach it: of a group, its members have them."""
OF_GROUPS = ("members", "prefer", "max_lag", "failover_after", "former_servers")
"""Fields that only a group has; the first one makes it one."""


class Server(Section):
    """A database server and how to reach it; or a group: one server with one history, which is reached through its
    members, replicas of each other or nodes of a cluster.

    Without `socket` and `host` the option file decides, else it is the usual socket.
    """

    refused: ClassVar = {
        "password": KEPT_IN_FILE.format("password_file, or under [client] in defaults_file"),
        "pass": KEPT_IN_FILE.format("password_file"),
        "datadir": "the server itself reports where its data is",
    }

    socket: LocalPath | None = optional(description="Its Unix socket.", examples=["/run/mysqld/mysqld.sock"])
    host: Words | None = optional(
        description="Its host, for TCP. Name the host itself, not a proxy before it.",
        examples=["db1.example.com"],
    )
    port: int | None = optional(ge=1, le=65535, description="Its port; 3306 by default.", examples=[3306])
    tls: Literal["verify-full", "verify-ca", "required", "off"] | None = optional(
        examples=["verify-full"],
        description="How the connection to a host is secured. `verify-full`: its certificate has to be of a known CA "
        "and for the name in `host`; `verify-ca`: of a known CA; `required`: encryption without "
        "verification, so an attacker can impersonate the server; `off`: no encryption. Only `verify-full` prevents "
        "man-in-the-middle attacks. A socket, and a loopback address, need none. Without it the option file decides.",
    )
    tls_ca: LocalPath | None = optional(
        examples=["/etc/backupd/shop-db1-ca.pem"],
        description="A file of the CA certificates to trust for it (PEM). By default `ssl-ca` of the option file, else "
        "the system's.",
    )
    user: Words | None = optional(
        description="The account; by default what the option file says.", examples=["backupd"]
    )
    defaults_file: LocalPath | None = optional(
        description="An option file of the database's own clients, with a [client] group.",
        examples=["/etc/backupd/shop-db1.cnf"],
    )
    password_file: LocalPath | None = optional(
        description="A file whose first line is the password.", examples=["/etc/backupd/shop-db1.password"]
    )
    password_env: Words | None = optional(
        description="An environment variable that holds the password.", examples=["SHOP_DB1_PASSWORD"]
    )
    restore_defaults_file: LocalPath | None = optional(
        examples=["/etc/backupd/shop-db1-restore.cnf"],
        description="An option file with the [client] group of an account that may write, for restores of tables into "
        "this server (`--into`). By default the account of the backups, which as a rule may only read.",
    )
    server_defaults_file: LocalPath | None = optional(
        examples=["/etc/mysql/my.cnf"],
        description="The option file that the server itself is started with. `restore --mode galera --start` starts a "
        "node with it. By default the files that a server reads without one: /etc/my.cnf and /etc/mysql/my.cnf.",
    )
    replication_defaults_file: LocalPath | None = optional(
        examples=["/etc/backupd/shop-replication.cnf"],
        description="An option file with the [client] group of an account with REPLICATION SLAVE, as which new "
        "replicas of this server connect to it (`restore --mode replica --source`).",
    )
    policy: Name = Field(
        description="The policy that it follows: the name of a file in the folder of policies. May be left out where "
        "an entry of `policies_by_label` matches its labels.",
        examples=["gold"],
    )
    labels: dict[Name, Name] = Field(
        default_factory=dict,
        max_length=MAX_LABELS,
        examples=[{"env": "prod", "site": "berlin"}],
        description="What groups it with others: keys and values of your choice. Commands take `--label env=prod`, "
        "`policies_by_label` gives policies by them.",
    )
    owner: Words = Field(
        "mysql", description="The operating system's user that restored files belong to.", examples=["mysql"]
    )
    members: tuple[Name, ...] = Field(
        (),
        min_length=1,
        max_length=MAX_MEMBERS,
        description="Makes it a group: the names of the servers through which it is reached. Each is an entry of "
        "`servers`, in this file or another, with an address and an account, and without a policy; `backup`, "
        "`restore`, `timeline` and all other commands take the name of the group. The group has no address.",
        examples=[["shop-db1", "shop-db2"]],
    )
    prefer: Literal["replica", "source", "any"] = Field(
        "replica",
        description="Of a group: which members are backed up first. Where none of these can be, the next one is, and "
        "the backup's record says why. Nodes of a Galera cluster are alike.",
        examples=["replica"],
    )
    max_lag: Duration = written(
        "60s",
        description="Of a group: a replica that is further behind its source is not backed up. A delay that is "
        "configured on the replica does not count.",
    )
    failover_after: Duration = written(
        "5m",
        description="Of a group: the binary log is streamed from one member until it has been unreachable for so "
        "long; then from another.",
    )

    former_servers: tuple[Name, ...] = Field(
        (),
        max_length=MAX_MEMBERS,
        description="Of a group: members that were servers with backups of their own. Those stay under their names, "
        "and no rule deletes them; without this entry backups of the group are refused. To go on with the history "
        "of one of them, give the group the name of that server, and the member another one.",
        examples=[["shop-db1"]],
    )

    @model_validator(mode="after")
    def _one_way(self) -> Server:
        if self.socket and self.host:
            raise ValueError("has both socket and host: give one")
        if self.port is not None and not self.host:
            raise ValueError("has a port but no host")
        if self.tls_ca and self.tls not in ("verify-full", "verify-ca"):
            raise ValueError("has a tls_ca, which only `tls: verify-full` and `tls: verify-ca` look at")
        if self.socket and self.tls:
            raise ValueError("has a socket, which is local: tls is for a host")
        if self.password_file and self.password_env:
            raise ValueError("has both password_file and password_env: give one")
        return self


class PolicyRule(Section):
    """Servers with all of these labels follow this policy, unless they name one themselves."""

    labels: dict[Name, Name] = Field(
        min_length=1, description="Labels, all of which a server must have.", examples=[{"env": "prod"}]
    )
    policy: Name = Field(description="The policy that they follow.", examples=["gold"])


class FilesystemDestination(FilesystemConfig):
    """A folder. Backups are trees of hardlinks in it, so it must be a file system that has them."""

    type: Literal["filesystem"] = Field(description="The kind of destination.", examples=["filesystem"])
    path: LocalPath = Field(
        description="The folder. Its parent must exist; the folder is made at the first backup.",
        examples=["/srv/backups"],
    )


class S3Destination(S3Config):
    """A bucket of Amazon S3 or of anything that speaks like it.

    Only sealed parts of files and of binary logs go to `storage_class` and `binlog_storage_class`; whatever is needed
    to know what there is (manifests, indexes, runbooks) is always STANDARD.
    """

    refused: ClassVar = dict.fromkeys(
        (
            "secret_access_key",
            "access_key_id",
            "access_key",
            "secret_key",
            "aws_access_key_id",
            "aws_secret_access_key",
        ),
        KEPT_IN_FILE.format("credentials_file"),
    )

    ca_file: LocalPath | None = optional(
        description="PEM file with the CA certificates to trust instead of the system's.",
        examples=["/etc/backupd/s3-ca.pem"],
    )
    credentials_file: LocalPath | None = optional(
        description=(
            "AWS shared credentials file. Default: the credential chain of the SDK (environment, ~/.aws, instance "
            "role)."
        ),
        examples=["/etc/backupd/s3-credentials"],
    )


class SftpDestination(SftpConfig):
    """A folder on another host, by SSH."""

    refused: ClassVar = {"password": "passwords are not supported: name a private key as key_file"}

    key_file: LocalPath = Field(
        description="The private key, without a passphrase.", examples=["/etc/backupd/sftp-key"]
    )
    known_hosts: LocalPath = Field(
        description="OpenSSH known_hosts file. backupd refuses to connect to a host that is not listed in it.",
        examples=["/etc/backupd/known_hosts"],
    )


DestinationSettings = Annotated[FilesystemDestination | S3Destination | SftpDestination, Field(discriminator="type")]


class Encryption(Section):
    """Everything stored is encrypted for these keys. Only public keys are needed here."""

    refused: ClassVar = {"passphrase": "encrypting needs none; restores read the file restore.passphrase_file"}

    gnupg_home: LocalPath = Field(description="GnuPG's home with the public keys.", examples=["/etc/backupd/gnupg"])
    recipients: tuple[Words, ...] = Field(
        min_length=1,
        description="Fingerprints or user ids of the keys; each alone can open every backup.",
        examples=[["ops@example.com"]],
    )
    compression_level: int = Field(
        1,
        ge=1,
        le=19,
        description=(
            "zstd compression level. Level 1 needs less than half the CPU time of level 3; files become a few "
            "percent larger."
        ),
        examples=[3],
    )
    signing_key: Fingerprint | None = optional(
        description="The fingerprint of the key that signs what is stored for every policy that does not say "
        "`signed: false`. Its secret half has to be in gnupg_home; it should open no backup. "
        "`backupd keys make-signing` makes one.",
        examples=["0123456789ABCDEF0123456789ABCDEF01234567"],
    )
    signing_passphrase_file: LocalPath | None = optional(
        description="A file whose first line is the passphrase of that key.",
        examples=["/etc/backupd/signing-passphrase"],
    )
    trusted_signers: tuple[Fingerprint, ...] = Field(
        (),
        description="Fingerprints of the keys whose signatures count; that of signing_key does in any case. Their "
        "public halves have to be in gnupg_home.",
        examples=[["0123456789ABCDEF0123456789ABCDEF01234567"]],
    )
    challenge: Duration = written(
        "90d",
        description="Interval of the key challenges: how often the holder of each key must prove that it still "
        "decrypts.",
    )


class Brake(Section):
    """What keeps rules from deleting too much at once, counted at each destination for all installations together."""

    share: Percent = written(
        "50%",
        description=(
            "Mass-deletion limit: the fraction of a destination's backups that retention may mark as deleted per "
            "day, in addition to the number of backups added that day. To exceed it: backupd retention SERVER "
            "--apply --really."
        ),
    )
    count: int = written(
        10,
        ge=1,
        description="Number of backups that retention may mark as deleted per day regardless of `share`.",
    )


class Retention(Section):
    """Limits on deletions by retention. The retention rules are in the policies."""

    brake: Brake = section("Limit on mass deletions.")


class Concurrency(Section):
    """Maximum numbers of concurrent jobs. Of one server, one backup runs at a time whatever is written here."""

    jobs: int = Field(4, ge=1, le=256, description="Jobs of any kind.", examples=[4])
    per_server: int = Field(1, ge=1, le=16, description="Jobs of one server.", examples=[1])
    per_destination: int = written(2, ge=1, le=64, description="Jobs that write to or read from one destination.")


class Scratch(Section):
    """Where test restores are made and thrown away."""

    path: LocalPath = written(
        "/var/lib/backupd/scratch", description="The folder. The database's user must be able to enter it."
    )
    max_bytes: Size | None = optional(description="Maximum size. Default: the free space.", examples=["500GiB"])
    memory: Size = written(
        "1GiB", description="The most memory for preparing and for the scratch server.", examples=["2GiB"]
    )


class Restore(Section):
    """Settings of restores. A machine that only takes backups does not have it, and should not."""

    refused: ClassVar = {"passphrase": KEPT_IN_FILE.format("passphrase_file")}

    gnupg_home: LocalPath = Field(
        description="GnuPG's home with the private key.", examples=["/etc/backupd/gnupg-restore"]
    )
    passphrase_file: LocalPath | None = optional(
        description="A file whose first line is the passphrase of that key.", examples=["/etc/backupd/passphrase"]
    )
    folders: tuple[LocalPath, ...] = Field(
        (),
        examples=[["/srv/restores"]],
        description="Beneath these folders operators may restore by the REST interface and the web page; admins may "
        "anywhere.",
    )
    key_files: tuple[LocalPath, ...] = Field(
        (),
        examples=[["/etc/mysql/encryption/keyfile.enc", "/etc/mysql/encryption/keyfile.key"]],
        description="Files that the servers' `file_key_management` reads. A backup of encrypted tables is prepared and "
        "started with copies of these; a key plugin that a backup names is loaded only where they stand "
        "here.",
    )
    scratch: Scratch = section("For test restores.")


class Configuration(Section):
    """The whole of the configuration file."""

    refused: ClassVar = {
        "password": KEPT_IN_FILE.format("password_file of a server"),
        "passphrase": KEPT_IN_FILE.format("restore.passphrase_file"),
        "recipients": "belongs under encryption",
        "gnupg_home": "belongs under encryption",
    }

    catalog: CatalogUrl = written(
        "sqlite:////var/lib/backupd/catalog.db",
        description="URL of the catalog: an SQLite file or a PostgreSQL database.",
        examples=["sqlite:////var/lib/backupd/catalog.db", "postgresql://backupd@db.example.com/backupd"],
    )
    spool: LocalPath = written(
        "/var/lib/backupd/spool",
        description="Spool folder: repository key, lock files and data that is not yet stored at every destination.",
    )
    policies: LocalPath = written(
        "policies",
        description="The folder of policies: each `NAME.yaml` in it is one. By default `policies` beside this file.",
        examples=["/etc/backupd/policies"],
    )
    host: Name | None = optional(
        description="Name of this host in the catalog: jobs are addressed to it. By default what the machine is called "
        "when it first uses the catalog. Give two hosts of which one stands by (`--standby`) the same name.",
        examples=["backup1"],
    )
    programs: dict[Name, LocalPath] = Field(
        default_factory=dict,
        description="Paths of programs, by name: `mysqld`, `xtrabackup`, `mariadb-backup`, ... Default: found in "
        "PATH. Use it for a server release that is unpacked elsewhere.",
        examples=[{"mysqld": "/opt/mysql-8.4/bin/mysqld"}],
    )
    servers_folder: LocalPath = written(
        "servers.d",
        description="A folder with more servers: each `NAME.yaml` in it is a mapping of servers by name, as below "
        "`servers`. By default `servers.d` beside this file, which need not exist.",
        examples=["/etc/backupd/servers.d"],
    )
    servers: dict[Name, Server] = Field(
        default_factory=dict,
        description="The database servers, by name. May be left out where files of `servers_folder` have some.",
    )
    policies_by_label: tuple[PolicyRule, ...] = Field(
        (),
        description="Policies of servers that name none: each entry gives one to the servers that have all of its "
        "labels. A server that entries with different policies match is refused until it names its own.",
        examples=[[{"labels": {"env": "prod"}, "policy": "gold"}]],
    )
    destinations: dict[Name, DestinationSettings] = Field(min_length=1, description="The destinations, by name.")
    encryption: Encryption = Field(description="The keys that backups are sealed for.")
    restore: Restore | None = optional(description="Settings of restores.")
    timezone: TimeZone = Field(
        "UTC",
        description="The time zone of schedules, where a policy names none. Where it is set, times on the command line "
        "may be written without an offset, as they are there, and are shown so beside UTC.",
        examples=["Europe/Berlin"],
    )
    concurrency: Concurrency = section("Maximum numbers of concurrent jobs.")
    retention: Retention = section("Limits on deletions by retention rules.")
    archive: Archive = section("Objects in archive classes, which have to be thawed before they can be read.")
    alerts: Alerts = section("Alert channels and recipients.")
    api: Api = section("The REST interface.")
