"""The configuration as the rest of the program sees it: one object, with everything about one server at hand."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backupd.model.errors import ConfigurationError, Problem, RefusedError, UnknownNameError, UsageError
from policies.alerts import Alerts
from policies.configuration import REACH, Api, Configuration, DestinationSettings, Encryption, Restore, Server
from policies.document import suggestion
from policies.handed import HandedServers, Loaded, revived
from policies.policy import Policy

if TYPE_CHECKING:
    from backupd.engine.sql.client import Connection
    from backupd.transfer.deletion_limit import DeletionLimit

DEFAULT_FILE = Path("/etc/backupd/backupd.yaml")
FILE_VARIABLE = "BACKUPD_CONFIG"


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Everything configured about one server. ``problems``: why its policy cannot be used; then whatever needs the
    policy raises ConfigurationError with them, and the rest goes on. ``ways``: of a group, its members by name, each
    with the file that it is written in; ``member``: the one that it is reached through, "" where none was chosen, and
    ``because``: why that one."""

    name: str
    file: Path
    config: Server
    destinations: Mapping[str, DestinationSettings]
    found: Policy | None
    problems: tuple[Problem, ...] = ()
    ways: Mapping[str, tuple[Server, Path]] = field(default_factory=dict)
    member: str = ""
    because: str = ""

    @property
    def is_group(self) -> bool:
        """Is it reached through members?"""
        return bool(self.config.members)

    def through(self, member: str, because: str = "") -> ServerSettings:
        """The same group, reached through this member of it. Raises UnknownNameError."""
        if member not in self.ways:
            raise UnknownNameError(
                f"{self.name} has no member {member!r}{suggestion(member, self.ways)}",
                hint=f"members of {self.name} are named under `members:` of it in {self.file}",
            )
        config, file = self.ways[member]
        reached = self.config.model_copy(update={name: getattr(config, name) for name in REACH})
        return dataclasses.replace(self, config=reached, file=file, member=member, because=because)

    @property
    def way(self) -> str:
        """The name of what is reached: of a group that of the member."""
        return self.member or self.name

    @property
    def usable(self) -> bool:
        """Is its policy valid?"""
        return self.found is not None

    @property
    def policy(self) -> Policy:
        """Raises ConfigurationError with every problem where it is broken."""
        if self.found is None:
            raise ConfigurationError(self.problems, hint=f"correct policy {self.policy_name}, which {self.name} uses")
        return self.found

    @property
    def required(self) -> Mapping[str, DestinationSettings]:
        """Its policy's destinations, by name."""
        return {key: self.destinations[key] for key in self.policy.destinations.required}

    @property
    def others(self) -> Mapping[str, DestinationSettings]:
        """Its policy's destinations that copies are brought to afterwards, by name."""
        return {key: self.destinations[key] for key in self.policy.destinations.others}

    @property
    def preferred(self) -> tuple[str, ...]:
        """Destinations to read from, the one to ask first before: those of its policy; where that is broken, all."""
        return (*self.required, *self.others) if self.usable else tuple(self.destinations)

    @property
    def policy_name(self) -> str:
        """Name of the policy that it follows, broken or not."""
        return self.config.policy

    @property
    def owner(self) -> str:
        """The operating system's user that restored files belong to."""
        return self.config.owner

    def connection(self, environ: Mapping[str, str] = os.environ) -> Connection:
        """Where the server is and as whom to ask. Reads option and password files, so it holds the password.

        Raises ConfigurationError for files that cannot be read and for a variable that is not set, RefusedError for a
        group of which no member was chosen.
        """
        config = self.config
        connection = self._connection(config.user, config.password_file, config.defaults_file)
        if config.password_env is None:
            return connection
        if config.password_env not in environ:
            place = f"servers.{self.way}.password_env"
            raise ConfigurationError(
                [Problem(str(self.file), None, place, f"the environment has no {config.password_env}")]
            )
        return dataclasses.replace(connection, password=environ[config.password_env])

    def restore_connection(self) -> Connection:
        """The same server, as the account that may write. Raises ConfigurationError as ``connection`` does."""
        if self.config.restore_defaults_file is None:
            return self.connection()
        return self._connection(None, None, self.config.restore_defaults_file)

    def connection_as(self, defaults_file: Path) -> Connection:
        """The same server, as the account of an option file. Raises ConfigurationError as ``connection`` does."""
        return self._connection(None, None, defaults_file)

    def _connection(self, user: str | None, password_file: Path | None, defaults_file: Path | None) -> Connection:
        from backupd.engine.sql.client import Connection
        from backupd.engine.sql.option_files import Tls

        config = self.config
        if self.is_group and not self.member:
            raise RefusedError(
                f"{self.name} is a group, which has no address",
                hint=f"it is reached through a member: {', '.join(self.ways) or 'none is in a file that is read'}",
            )
        return Connection.from_config(
            socket=config.socket,
            host=config.host,
            port=config.port,
            user=user,
            password_file=password_file,
            defaults_file=defaults_file,
            tls=Tls(config.tls) if config.tls is not None else None,
            tls_ca=config.tls_ca,
        )


@dataclass(frozen=True, slots=True)
class Settings:
    """``configuration`` and ``policies`` are valid and agree with each other. ``file``: where they were read;
    ``broken``: what is wrong with each policy that cannot be used; ``document``: all that is valid as plain values;
    ``files``: where servers are written that are not in ``file``; ``unread``: what is wrong with files of servers that
    were left out; ``members``: of groups, by their names, which are not among the servers; ``groups``: the group of
    each."""

    file: Path
    configuration: Configuration
    policies: Mapping[str, Policy]
    broken: Mapping[str, tuple[Problem, ...]] = field(default_factory=dict)
    document: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, Path] = field(default_factory=dict)
    unread: tuple[Problem, ...] = ()
    members: Mapping[str, Server] = field(default_factory=dict)
    groups: Mapping[str, str] = field(default_factory=dict)

    @property
    def catalog(self) -> str:
        """The catalog's URL."""
        return self.configuration.catalog

    @property
    def spool(self) -> Path:
        """The folder for what waits or must survive a restart: binary logs, locks, challenges."""
        return self.configuration.spool

    @property
    def programs(self) -> Mapping[str, str]:
        """Programs that are not searched: name to path."""
        return {name: str(path) for name, path in self.configuration.programs.items()}

    @property
    def servers(self) -> Mapping[str, Server]:
        """Configured servers by name."""
        return self.configuration.servers

    @property
    def destinations(self) -> Mapping[str, DestinationSettings]:
        """Configured destinations by name."""
        return self.configuration.destinations

    @property
    def encryption(self) -> Encryption:
        """Keyring, recipients, and the key that signs."""
        return self.configuration.encryption

    @property
    def restore(self) -> Restore | None:
        """Where the private keys are; None on a machine that only takes backups."""
        return self.configuration.restore

    @property
    def deletion_limit(self) -> DeletionLimit:
        """What rules may mark within a day at one destination."""
        from backupd.transfer.deletion_limit import DeletionLimit

        return DeletionLimit(self.configuration.retention.brake.share, self.configuration.retention.brake.count)

    @property
    def alerts(self) -> Alerts:
        """Mail, other channels, and what is sent when."""
        return self.configuration.alerts

    @property
    def api(self) -> Api:
        """Where the REST interface listens, and who may read metrics."""
        return self.configuration.api

    def server(self, name: str) -> ServerSettings:
        """Raises UnknownNameError."""
        config = self.servers.get(name)
        if config is None and name in self.groups:
            raise UnknownNameError(
                f"{name} is a member of the group {self.groups[name]}, and no server of its own",
                hint=f"backups, binary logs and rules are those of {self.groups[name]}: name that",
            )
        if config is None:
            raise UnknownNameError(
                f"no server {name!r} in {self.file}{suggestion(name, self.servers)}",
                hint="servers are named under `servers:` in the configuration file, or in a file of servers.d",
            )
        return ServerSettings(
            name,
            self.files.get(name, self.file),
            config,
            self.destinations,
            self.policies.get(config.policy),
            self.broken.get(config.policy, ()),
            {
                member: (self.members[member], self.files.get(member, self.file))
                for member in config.members
                if member in self.members
            },
        )

    def reached(self, name: str) -> ServerSettings:
        """A server, or a group through the member of this name. Raises UnknownNameError."""
        return self.server(self.groups[name]).through(name) if name in self.groups else self.server(name)

    def ways(self) -> Iterator[ServerSettings]:
        """Every server as it is reached: a group through each of its members."""
        for name in self.servers:
            server = self.server(name)
            yield from map(server.through, server.ways) if server.is_group else (server,)

    def is_unread(self, server: str) -> bool:
        """May this server be in one of the files that were left out? Then nobody knows that it is gone."""
        return bool(self.unread) and server not in {"", *self.servers}

    def labelled(self, labels: Collection[str], server: str | None = None) -> tuple[str, ...]:
        """The servers that have all of these labels, written KEY=VALUE. Raises UsageError for what is not written so,
        and where ``server`` is asked for besides, UnknownNameError for a label that no server has."""
        if server is not None:
            raise UsageError("a server and labels exclude each other", hint="give one of them")
        known = {f"{key}={value}" for server in self.servers.values() for key, value in server.labels.items()}
        wanted = set(labels)
        for label in sorted(wanted - known):
            if "=" not in label:
                raise UsageError(f"{label!r} is not a label", hint="write KEY=VALUE, for example env=prod")
            raise UnknownNameError(
                f"no server has the label {label!r}{suggestion(label, known)}",
                hint="labels are written under `labels:` of a server in the configuration",
            )
        return tuple(
            name
            for name, server in self.servers.items()
            if wanted <= {f"{key}={value}" for key, value in server.labels.items()}
        )

    def followed(self) -> Mapping[str, str]:
        """The name of the policy of each server; of servers that were handed on, without making them."""
        servers = self.servers
        if isinstance(servers, HandedServers):
            return {name: servers.policy(name) for name in servers}
        return {name: server.policy for name, server in servers.items()}

    def destination(self, name: str) -> DestinationSettings:
        """Raises UnknownNameError."""
        if name not in self.destinations:
            raise UnknownNameError(
                f"no destination {name!r} in {self.file}{suggestion(name, self.destinations)}",
                hint="destinations are named under `destinations:` in the configuration file",
            )
        return self.destinations[name]

    def unused(self) -> tuple[Problem, ...]:
        """What is wrong with policies that no server follows."""
        used = set(self.followed().values())
        return tuple(problem for name, found in sorted(self.broken.items()) if name not in used for problem in found)

    def hold(self, folder: Path) -> Path:
        """Write all that is in force into a file of this private folder, for ``held_settings``. Raises OSError."""
        descriptor, name = tempfile.mkstemp(prefix="settings-", suffix=".json", dir=folder)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(self.document, file)
        return Path(name)

    def needs_restore(self) -> Restore:
        """The restore section. Raises ConfigurationError when this machine has none."""
        if self.restore is None:
            raise ConfigurationError(
                [Problem(str(self.file), None, "restore", "is missing: it names the private key")],
                hint="restores and test restores run only where a decryption key lives",
            )
        return self.restore


def settings_file(named: Path | None = None, environ: Mapping[str, str] = os.environ) -> Path:
    """The file to read: the one that was named, else $BACKUPD_CONFIG, else /etc/backupd/backupd.yaml."""
    return named or Path(environ.get(FILE_VARIABLE) or DEFAULT_FILE)


def load_settings(
    file: Path | None = None, environ: Mapping[str, str] = os.environ, *, strict: bool = True, whole: bool = True
) -> Settings:
    """Read the configuration and all policies. Raises ConfigurationError with every problem of every file in use; with
    ``strict`` False those of policies are left to whoever needs the policy, and with ``whole`` False files of servers
    that have one are left out: whoever asks for that has to tell."""
    from policies.load import load  # whoever has them handed on reads no YAML

    return _settings(load(settings_file(file, environ), strict=strict, whole=whole))


def held_settings(file: Path) -> Settings:
    """What ``Settings.hold`` has written: the settings of a running service, whatever its files say by now. Raises
    ConfigurationError."""
    try:
        return _settings(revived(json.loads(file.read_text(encoding="utf-8"))))
    except (OSError, ValueError, KeyError) as error:
        problem = Problem(str(file), None, "", f"does not hold a service's settings: {error}")
        raise ConfigurationError([problem]) from error


def _settings(loaded: Loaded) -> Settings:
    return Settings(
        loaded.file,
        loaded.configuration,
        loaded.policies,
        loaded.broken,
        loaded.document,
        loaded.files,
        loaded.unread,
        loaded.members,
        loaded.groups,
    )


def spool_unusable(
    spool: Path,
    error: OSError,
    hint: str = "make it a writable folder of this user, with room; see spool: in the configuration",
) -> RefusedError:
    """What to raise when something cannot be written there."""
    return RefusedError(f"the spool {spool} cannot be used: {error.strerror or error}", hint=hint)


def spool_folder(settings: Settings, server: str) -> Path:
    """Where the binary logs of ``server`` wait for the destinations."""
    return settings.spool / "binlogs" / server
