"""Servers: those of the configuration file and those of the files of ``servers.d``, each of which is a mapping of
servers by name; and the policy that a server follows by its labels."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import islice
from pathlib import Path

from pydantic import RootModel

from backupd.model.errors import Problem
from backupd.model.text import is_name
from policies.configuration import Server
from policies.document import Node, line_and_name
from policies.fields import SUFFIX, Name
from policies.yaml_tree import read_document

MAX_FILES = 10_000
"""In the folder: whoever has more has put something else there."""


@cache
def servers_file() -> type[RootModel[dict[str, Server]]]:
    """The schema of a file of ``servers.d``; most installations have none, and it takes as long to make as that of the
    configuration."""

    class ServersFile(RootModel[dict[Name, Server]]):
        """Servers by name."""

    return ServersFile


@dataclass(frozen=True, slots=True)
class Source:
    """A file with servers. ``node``: its tree; ``steps``: what leads to its servers there."""

    path: Path
    node: Node
    steps: tuple[str, ...] = ()

    @property
    def servers(self) -> Mapping[str, Node]:
        """The tree of each server by its name; none where there is no mapping."""
        found = self.node.at(*self.steps)
        return found.value if found is not None and isinstance(found.value, dict) else {}

    def line_and_name(self, *steps: str | int) -> tuple[int, str]:
        """The line of what ``steps``, of which the first is a server, lead to; and its dotted name."""
        return line_and_name(self.node, (*self.steps, *steps))

    def problem(self, message: str, *steps: str | int) -> Problem:
        """One with what ``steps`` lead to."""
        return Problem(str(self.path), *self.line_and_name(*steps), message)


@dataclass(slots=True)
class Folder:
    """What was read from ``servers.d``. ``problems``: of the folder; ``of_files``: of some of its files."""

    sources: list[Source] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    of_files: list[Problem] = field(default_factory=list)


def read_folder(folder: Path, *, named: Problem | None) -> Folder:
    """Every file of the folder, in the order of their names. ``named``: where the configuration names it, if it does;
    otherwise it need not exist, nor hold any. What may be meant as one is read, or a problem."""
    read = Folder()
    try:
        with os.scandir(folder) as found:
            entries = sorted(islice(found, MAX_FILES + 1), key=lambda entry: entry.name)
    except (OSError, ValueError) as error:
        if not isinstance(error, FileNotFoundError) or os.path.lexists(folder) or named is not None:
            reason = "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be read: {error}"
            where = (named.file, named.line, named.field) if named is not None else (str(folder), None, "")
            read.problems.append(Problem(*where, f"the folder {folder} {reason}"))
        return read
    if len(entries) > MAX_FILES:
        read.problems.append(Problem(str(folder), None, "", f"holds more than {MAX_FILES:,} files"))
        return read
    inside = os.path.realpath(folder)
    for entry in entries:
        if entry.name.startswith("."):
            continue  # locks of editors; ..data, where Kubernetes puts the files that the others are links to
        if why := _refusal(entry, inside):
            read.of_files.append(Problem(str(folder), None, "", f"{entry.name!r} {why}"))
        elif entry.name.endswith(SUFFIX):
            path = Path(entry.path)
            node, problems = read_document(path)
            read.of_files += problems
            if node is not None:
                read.sources.append(Source(path, node))
    if named is not None and not (read.sources or read.problems or read.of_files):
        message = f"the folder {folder} holds no file of servers: is it mounted?"
        read.problems.append(replace(named, message=message))
    return read


def _refusal(entry: os.DirEntry[str], inside: str) -> str:
    """Why it cannot be one of the files; "" of one that can be, and of what nobody takes for one."""
    stem, _dot, suffix = entry.name.rpartition(".")
    if suffix == "yml":
        return f"would be ignored: name it {stem}{SUFFIX}"
    if not entry.name.endswith(SUFFIX):
        return "is a folder: only files of the folder itself are read" if Path(entry.path).is_dir() else ""
    if not is_name(stem):
        return "cannot be the name of a file of servers: letters, digits, '.', '_' and '-' only"
    if entry.is_symlink() and os.path.commonpath([inside, target := os.path.realpath(entry.path)]) != inside:
        return f"is a link to {target!r}, outside of this folder: put the file itself here"
    return ""


def duplicates(sources: Sequence[Source]) -> Iterator[Problem]:
    """Servers that several files have; each problem names both files."""
    first: dict[str, Source] = {}
    for source in sources:
        for name in source.servers:
            earlier = first.setdefault(name, source)
            if earlier is not source:
                line, _dotted = earlier.line_and_name(name)
                yield source.problem(f"server `{name}` is in {earlier.path}, line {line}, too: remove one", name)


def wrapped(source: Source) -> Iterator[Problem]:
    """A file of ``servers.d`` that is written like the configuration, with its servers below `servers`."""
    inner = source.node.child("servers")
    if isinstance(inner, Node) and isinstance(inner.value, dict):
        inside = [one.value for one in inner.value.values()]
        if inside and all(isinstance(one, dict) for one in inside):
            yield source.problem("a file of this folder begins with its servers: remove this line", "servers")


@dataclass(frozen=True, slots=True)
class Rule:
    """Of ``policies_by_label``: servers with all these labels follow this policy."""

    labels: Mapping[str, str]
    policy: str
    line: int


def rules(node: Node) -> list[Rule]:
    """Of the tree of a configuration, as far as they make sense."""
    written = node.child("policies_by_label")
    found = []
    for one in written.value if written is not None and isinstance(written.value, list) else ():
        named, labels = one.child("policy"), _labels(one)
        if named is not None and isinstance(named.value, str) and labels:
            found.append(Rule(labels, named.value, named.line))
    return found


def assign(sources: Sequence[Source], given: Sequence[Rule], members: Collection[str] = ()) -> Iterator[Problem]:
    """Give each server that names no policy the one that its labels match; a problem where they match several. What is
    written into the trees has a line, and no ``key_lines``. ``members``: of groups, which follow those."""
    for source in sources:
        for name, server in source.servers.items():
            if not isinstance(server.value, dict) or "policy" in server.value or name in members:
                continue
            labels = _labels(server).items()
            matching = {rule.policy: rule for rule in given if rule.labels.items() <= labels}
            if not matching:
                continue  # the schema asks for the policy
            rule = next(iter(matching.values()))
            server.value["policy"] = Node(rule.line, rule.policy)
            if len(matching) > 1:
                which = " and ".join(f"`{one.policy}` (line {one.line})" for one in matching.values())
                yield source.problem(
                    f"its labels match several entries of policies_by_label: {which}: name its `policy` here", name
                )


def _labels(node: Node) -> dict[str, str]:
    found = node.child("labels")
    if found is None or not isinstance(found.value, dict):
        return {}
    return {key: value.value for key, value in found.value.items() if isinstance(value.value, str)}
