"""What was read and is valid, and how a service hands it on to its processes: as plain values, which are not read from
the files again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from backupd.model.errors import ConfigurationError, Problem
from policies.configuration import Configuration, Server
from policies.document import Model
from policies.fields import BASE, SUFFIX, Section
from policies.policy import Policy


@dataclass(frozen=True, slots=True)
class Loaded:
    """A configuration with all its servers and its policies, checked against each other. ``files``: where servers are
    written that are not in the configuration file; ``broken``: what is wrong with policies that cannot be used, by
    their name; of those that no server follows, unless others were asked for. ``document``: all that is valid as plain
    values, which ``revived`` understands. ``unread``: what is wrong with files of servers that were left out.
    ``members``: of groups, by their names, which are not among the servers; ``groups``: the group of each."""

    file: Path
    configuration: Configuration
    policies: Mapping[str, Policy] = field(default_factory=dict)
    broken: Mapping[str, tuple[Problem, ...]] = field(default_factory=dict)
    document: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, Path] = field(default_factory=dict)
    unread: tuple[Problem, ...] = ()
    members: Mapping[str, Server] = field(default_factory=dict)
    groups: Mapping[str, str] = field(default_factory=dict)


def prepare() -> None:
    """Build the validators of what is handed on. Without it ``revived`` does that, which is most of its work: call this
    in a process that others are forked from."""
    for section in sections(Section):
        section.model_rebuild()


def sections(base: type[Section]) -> Iterator[type[Section]]:
    """Every kind of section that is defined."""
    for kind in base.__subclasses__():
        yield kind
        yield from sections(kind)


def revived(document: Mapping[str, Any]) -> Loaded:
    """From the ``document`` of what was loaded, the same again, without a look at its files. Paths still begin at the
    folders of those. A server is made of it when it is first asked for, since most processes need one of many. Raises
    ConfigurationError, KeyError."""
    path = Path(document["file"])
    configuration = _revived(Configuration, document["configuration"], path)
    sources = [(Path(file), servers) for file, servers in document.get("servers", ())]
    groups = dict(document.get("groups", {}))
    plain_of = {name: (plain, file) for file, servers in sources for name, plain in servers.items()}
    members = HandedServers({name: one for name, one in plain_of.items() if name in groups})
    if sources:
        handed = HandedServers({name: one for name, one in plain_of.items() if name not in groups})
        configuration = configuration.model_copy(update={"servers": handed})
    policies = {
        name: _revived(Policy, plain, configuration.policies / f"{name}{SUFFIX}")
        for name, plain in document["policies"].items()
    }
    broken = {name: tuple(Problem(*one) for one in found) for name, found in document.get("broken", {}).items()}
    files = {name: file for file, servers in sources[1:] for name in servers}
    return Loaded(path, configuration, policies, broken, document, files, (), members, groups)


class HandedServers(Mapping[str, Server]):
    """Servers that were valid when they were read: from plain values, each with the file that it was in. Asking for one
    raises ConfigurationError where this version does not understand it."""

    def __init__(self, plain: Mapping[str, tuple[Any, Path]]) -> None:
        self._plain = plain
        self._made: dict[str, Server] = {}

    def __getitem__(self, name: str) -> Server:
        if name not in self._made:
            self._made[name] = _revived(Server, *self._plain[name])
        return self._made[name]

    def __contains__(self, name: object) -> bool:
        return name in self._plain

    def policy(self, name: str) -> str:
        """The one that a server follows, without the rest of it."""
        followed: str = self._plain[name][0]["policy"]
        return followed

    def __iter__(self) -> Iterator[str]:
        return iter(self._plain)

    def __len__(self) -> int:
        return len(self._plain)


def _revived(model: type[Model], plain: Any, file: Path) -> Model:
    try:
        return model.model_validate(plain, context={BASE: file.absolute().parent})
    except ValidationError as error:
        message = f"{len(error.errors())} settings that were in force do not fit this version: was it upgraded?"
        raise ConfigurationError([Problem(str(file), None, "", message)]) from error
