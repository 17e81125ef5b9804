"""Groups of servers: a group is one server with a policy and a history that is reached through any of its members. A
member is an entry of `servers` that says how to reach it, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from backupd.model.errors import Problem
from policies.configuration import OF_GROUPS, REACH, Server
from policies.document import Node, suggestion
from policies.servers import Source


@dataclass(slots=True)
class Groups:
    """``of``: the group of each member, by the member's name."""

    of: dict[str, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Entry:
    """A server of a file."""

    source: Source
    node: Node


def read_groups(sources: Sequence[Source]) -> Groups:
    """What the files say of groups, and everything that is wrong with that."""
    entries = {name: _Entry(source, node) for source in sources for name, node in source.servers.items()}
    found = Groups()
    lines: dict[str, int] = {}
    for group, entry in entries.items():
        if "members" not in _fields(entry.node):
            found.problems += _alone(group, entry)
            continue
        found.problems += _without_address(group, entry)
        found.problems += _former(group, entry)
        for number, member in _members(entry.node):
            found.problems += _member(found.of, lines, entries, (group, number, member))
            line, _dotted = entry.source.line_and_name(group, "members", number)
            found.of.setdefault(member, group)
            lines.setdefault(member, line)
    return found


def inherit(sources: Sequence[Source], groups: Mapping[str, str]) -> None:
    """Give each member the policy of its group, in the trees: it has none itself."""
    policies = {name: node.child("policy") for source in sources for name, node in source.servers.items()}
    for source in sources:
        for name, node in source.servers.items():
            if name in groups and isinstance(node.value, dict):
                group = groups[name]
                node.value.setdefault("policy", policies.get(group) or Node(node.line, group))


def _alone(name: str, entry: _Entry) -> Iterator[Problem]:
    """Of a server without members."""
    for field_ in OF_GROUPS[1:]:
        if field_ in _fields(entry.node):
            yield entry.source.problem("is of groups, and this server has no `members`", name, field_)


def _former(group: str, entry: _Entry) -> Iterator[Problem]:
    known = [name for _number, name in _members(entry.node)]
    for number, name in _names(entry.node, "former_servers"):
        if name not in known:
            message = f"`{name}` is no member of `{group}`{suggestion(name, known)}"
            yield entry.source.problem(message, group, "former_servers", number)


def _without_address(group: str, entry: _Entry) -> Iterator[Problem]:
    for field_ in _fields(entry.node):
        if field_ in REACH:
            yield entry.source.problem("a group has no address: write it for each of its members", group, field_)


def _member(
    groups: Mapping[str, str], lines: Mapping[str, int], entries: Mapping[str, _Entry], mention: tuple[str, int, str]
) -> Iterator[Problem]:
    """Of one mention: the group, its place in the list, and the name of the member."""
    group, number, name = mention
    at = entries[group].source
    where = (group, "members", number)
    if name in groups:
        again = f"again (line {lines[name]})" if groups[name] == group else f"of `{groups[name]}`, too"
        yield at.problem(f"`{name}` is a member {again}: a server is in one group, once", *where)
        return
    member = entries.get(name)
    if member is None:
        yield at.problem(f"no server `{name}` among the servers{suggestion(name, set(entries) - {group})}", *where)
        return
    if "members" in _fields(member.node):
        yield at.problem(f"`{name}` is a group: a group has no groups as members", *where)
        return
    for field_ in _fields(member.node):
        if field_ in Server.model_fields and field_ not in REACH:
            message = f"`{name}` is a member of `{group}`, which alone has `{field_}`: write it there"
            yield member.source.problem(message, name, field_)


def _members(node: Node) -> list[tuple[int, str]]:
    return _names(node, "members")


def _names(node: Node, field_: str) -> list[tuple[int, str]]:
    written = node.child(field_)
    items = written.value if written is not None and isinstance(written.value, list) else []
    return [(number, item.value) for number, item in enumerate(items) if isinstance(item.value, str)]


def _fields(node: Node) -> Mapping[str, Node]:
    return node.value if isinstance(node.value, dict) else {}
