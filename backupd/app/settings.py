"""The configuration as the rest of the program sees it: one object, with everything about one server at hand."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from backupd.engine.client import Connection
from backupd.model.errors import ConfigurationError, NotFoundError, Problem
from policies.configuration import Alerts, Api, Configuration, DestinationSettings, Encryption, Restore, Server
from policies.load import load
from policies.problems import suggestion
from policies.schema import Policy

DEFAULT_FILE = Path("/etc/backupd/backupd.yaml")
FILE_VARIABLE = "BACKUPD_CONFIG"


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Everything configured about one server. ``required`` and ``others`` are its policy's destinations, by name."""

    name: str
    file: Path
    config: Server
    policy: Policy
    required: Mapping[str, DestinationSettings]
    others: Mapping[str, DestinationSettings]

    @property
    def policy_name(self) -> str:
        return self.config.policy

    @property
    def owner(self) -> str:
        """The operating system's user that restored files belong to."""
        return self.config.owner

    def connection(self, environ: Mapping[str, str] = os.environ) -> Connection:
        """Where the server is and as whom to ask. Reads option and password files, so it holds the password.

        Raises ConfigurationError for files that cannot be read and for a variable that is not set.
        """
        config = self.config
        connection = Connection.from_config(
            socket=config.socket, host=config.host, port=config.port, user=config.user,
            password_file=config.password_file, defaults_file=config.defaults_file)
        if config.password_env is None:
            return connection
        if config.password_env not in environ:
            raise ConfigurationError([Problem(str(self.file), None, f"servers.{self.name}.password_env",
                                              f"the environment has no {config.password_env}")])
        return dataclasses.replace(connection, password=environ[config.password_env])


@dataclass(frozen=True, slots=True)
class Settings:
    """``configuration`` and ``policies`` are valid and agree with each other. ``file``: where they were read."""

    file: Path
    configuration: Configuration
    policies: Mapping[str, Policy]

    @property
    def catalog(self) -> str:
        """The catalog's URL."""
        return self.configuration.catalog

    @property
    def spool(self) -> Path:
        return self.configuration.spool

    @property
    def programs(self) -> Mapping[str, str]:
        """Programs that are not searched: name to path."""
        return {name: str(path) for name, path in self.configuration.programs.items()}

    @property
    def servers(self) -> Mapping[str, Server]:
        return self.configuration.servers

    @property
    def destinations(self) -> Mapping[str, DestinationSettings]:
        return self.configuration.destinations

    @property
    def encryption(self) -> Encryption:
        return self.configuration.encryption

    @property
    def restore(self) -> Restore | None:
        return self.configuration.restore

    @property
    def alerts(self) -> Alerts:
        return self.configuration.alerts

    @property
    def api(self) -> Api:
        return self.configuration.api

    def server(self, name: str) -> ServerSettings:
        """Raises NotFoundError."""
        config = self.servers.get(name)
        if config is None:
            raise NotFoundError(f"no server {name!r} in {self.file}{suggestion(name, self.servers)}",
                                hint="servers are named under `servers:` in the configuration file")
        policy = self.policies[config.policy]
        return ServerSettings(
            name=name, file=self.file, config=config, policy=policy,
            required={key: self.destinations[key] for key in policy.destinations.required},
            others={key: self.destinations[key] for key in policy.destinations.others})

    def destination(self, name: str) -> DestinationSettings:
        """Raises NotFoundError."""
        if name not in self.destinations:
            raise NotFoundError(f"no destination {name!r} in {self.file}{suggestion(name, self.destinations)}",
                                hint="destinations are named under `destinations:` in the configuration file")
        return self.destinations[name]

    def needs_restore(self) -> Restore:
        """The restore section. Raises ConfigurationError when this machine has none."""
        if self.restore is None:
            raise ConfigurationError([Problem(str(self.file), None, "restore", "is missing: it names the private key")],
                                     hint="restores and test restores run only where a decryption key lives")
        return self.restore


def settings_file(named: Path | None = None, environ: Mapping[str, str] = os.environ) -> Path:
    """The file to read: the one that was named, else $BACKUPD_CONFIG, else /etc/backupd/backupd.yaml."""
    return named or Path(environ.get(FILE_VARIABLE) or DEFAULT_FILE)


def load_settings(file: Path | None = None, environ: Mapping[str, str] = os.environ) -> Settings:
    """Read the configuration and all policies. Raises ConfigurationError with every problem of every file."""
    loaded = load(settings_file(file, environ))
    return Settings(loaded.file, loaded.configuration, loaded.policies)
