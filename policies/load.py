"""Reading policies and the configuration from their files, with every problem of all of them at once."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path

from backupd.model.errors import ConfigurationError, Problem
from backupd.model.text import is_name
from policies.configuration import Configuration
from policies.document import Node, limited, line_and_name, suggestion, validate
from policies.fields import SUFFIX, local_path
from policies.groups import inherit, read_groups
from policies.handed import Loaded
from policies.lint import contradictions
from policies.policy import Policy
from policies.servers import Folder, Source, assign, duplicates, read_folder, rules, servers_file, wrapped
from policies.yaml_tree import read_document, read_text


@dataclass(frozen=True, slots=True)
class PolicyFile:
    """What was read from one policy file: the value when it is valid, the tree when it could be parsed."""

    path: Path
    policy: Policy | None
    node: Node | None
    problems: tuple[Problem, ...]


def load(path: Path, *, strict: bool = True, whole: bool = True) -> Loaded:
    """The configuration file, every file of servers, and every policy in its folder. Raises ConfigurationError, all
    problems in one.

    A policy that no server follows, or any one where not ``strict``, raises nothing: it is among the ``broken``. Where
    not ``whole``, a file of servers with a problem raises nothing either, as long as others have servers: it is
    ``unread``, and its servers are missing.
    """
    node, problems = read_document(path)
    if node is None:
        raise ConfigurationError(
            problems,
            hint=f"`backupd policy example backupd` shows a complete file for {path}" if not path.exists() else "",
        )
    sources, of_files, groups = _sources(node, path, problems)
    configuration, wrong = validate(Configuration, node, path)
    problems += wrong
    problems += _shared_destinations(configuration, node, path)
    servers = dict(configuration.servers) if configuration else {}
    for source in sources[1:]:
        found, wrong = validate(servers_file(), source.node, source.path)
        of_files += list(wrapped(source)) or wrong
        if whole or not any(one.file == str(source.path) for one in of_files):
            servers.update(found.root if found else {})
    unread = () if whole or not servers else tuple(of_files)
    if unread:
        bad = {one.file for one in unread}
        sources = [sources[0], *(source for source in sources[1:] if str(source.path) not in bad)]
    else:
        problems += of_files
    folder = configuration.policies if configuration else _guess_folder(node, path, "policies")
    wrong_folder: list[Problem] = []
    line = node.key_lines.get("policies")
    files = {} if folder is None else read_policies(folder, wrong_folder, file=path, line=line)
    destinations = node.names("destinations")
    broken = _broken(files, destinations, wrong_folder)
    if folder is not None and folder.is_dir():
        for name, unknown in _unknown_policies(node, sources, files):
            broken.setdefault(name, []).append(unknown)
    used = {server.policy for server in servers.values()} if configuration else set(broken)
    nowhere = [problem for problem in wrong_folder if problem.file == str(path)]
    for name in used - set(files):
        broken.setdefault(name, []).extend(nowhere)
    if strict or configuration is None:
        fatal = {id(one): one for name in used & set(broken) for one in broken[name]}
        problems += [*fatal.values(), *(one for one in nowhere if id(one) not in fatal)]
    if problems or configuration is None:
        raise ConfigurationError(sorted(problems, key=lambda p: (p.file != str(path), p.file, p.line or 0)))
    good = {name: found for name, found in files.items() if found.policy and name not in broken}
    named = [name for one in sources for name in one.servers]
    return Loaded(
        path,
        configuration.model_copy(update={"servers": {name: servers[name] for name in named if name not in groups}}),
        {name: found.policy for name, found in good.items() if found.policy},
        {name: tuple(found) for name, found in broken.items()},
        {
            "file": str(path.absolute()),
            "configuration": {name: one.plain() for name, one in _children(node).items() if name != "servers"},
            "servers": [
                [str(one.path.absolute()), {name: server.plain() for name, server in one.servers.items()}]
                for one in sources
            ],
            "policies": {name: found.node.plain() for name, found in good.items() if found.node},
            "broken": {
                name: [[one.file, one.line, one.field, one.message] for one in found] for name, found in broken.items()
            },
            "groups": dict(groups),
        },
        {name: source.path for source in sources[1:] for name in source.servers},
        unread,
        {name: servers[name] for name in named if name in groups},
        groups,
    )


def _sources(node: Node, path: Path, problems: list[Problem]) -> tuple[list[Source], list[Problem], Mapping[str, str]]:
    """The files that have servers, first the configuration, with the policies that labels and groups give; what is
    wrong with those of the folder, apart from the servers themselves; and the group of each member. What is wrong with
    the configuration and with the folder itself is added to ``problems``."""
    named = node.child("servers_folder")
    folder = _guess_folder(node, path, "servers_folder", "servers.d")
    where = Problem(str(path), *line_and_name(node, ("servers_folder",)), "") if named is not None else None
    read = read_folder(folder, named=where) if folder is not None else Folder()
    sources = [Source(path, node, ("servers",)), *read.sources]
    problems += read.problems
    if node.child("servers") is None and not (read.sources or read.problems or read.of_files):
        message = f"is missing: {Configuration.model_fields['servers'].description}"
        problems.append(Problem(str(path), node.line, "servers", message))
    of_files = [*read.of_files, *duplicates(sources)]
    groups = read_groups(sources)
    for problem in [*groups.problems, *assign(sources, rules(node), groups.of)]:
        (problems if problem.file == str(path) else of_files).append(problem)
    inherit(sources, groups.of)
    return sources, of_files, groups.of


def _shared_destinations(configuration: Configuration | None, node: Node, path: Path) -> list[Problem]:
    """Destinations of which one is another, or is inside of it: each names both."""
    found = {} if configuration is None else {name: one.address for name, one in configuration.destinations.items()}
    problems = []
    for (name, (space, parts)), (other, (its, outer)) in permutations(found.items(), 2):
        if space != its or parts[: len(outer)] != outer or (parts == outer and name < other):
            continue
        field_of = {"filesystem": "path", "sftp": "path", "s3": "bucket"}[space[0]]
        how = "is the same folder or bucket as" if parts == outer else "is inside of"
        line_of, dotted_of = line_and_name(node, ("destinations", other, field_of))
        message = (
            f"destination `{name}` {how} `{other}` ({dotted_of}, line {line_of}): "
            "give each destination its own folder, bucket or prefix"
        )
        problems.append(Problem(str(path), *line_and_name(node, ("destinations", name, field_of)), message))
    return problems


def _broken(
    files: Mapping[str, PolicyFile], destinations: Collection[str], wrong_folder: Sequence[Problem]
) -> dict[str, list[Problem]]:
    """What is wrong with each policy, by its name."""
    broken: dict[str, list[Problem]] = {}
    for name, found in files.items():
        if wrong := [*found.problems, *unknown_destinations(found, destinations)]:
            broken[name] = wrong
    for problem in wrong_folder:
        if problem.field != "policies":
            broken.setdefault(Path(problem.file).stem, []).append(problem)
    return broken


def read_policy(path: Path) -> PolicyFile:
    """Never raises: what is wrong is in ``problems``."""
    return _policy_file(path, *read_document(path))


def read_policy_text(text: str, path: Path) -> PolicyFile:
    """The same of a text that may become the file ``path``."""
    return _policy_file(path, *read_text(text, str(path)))


def _policy_file(path: Path, node: Node | None, problems: list[Problem]) -> PolicyFile:
    policy = None
    if node is not None:
        policy, wrong = validate(Policy, node, path)
        problems += wrong
        problems += limited(_retention_elsewhere(node, path), path)
        problems += _contradictions(policy, node, path)
    return PolicyFile(path, policy, node, tuple(problems))


def read_policies(folder: Path, problems: list[Problem], *, file: Path, line: int | None) -> dict[str, PolicyFile]:
    """Every policy of a folder by name. Adds to ``problems`` what is wrong with the folder itself.

    ``file`` and ``line`` say where the folder was named.
    """
    try:
        paths = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except (OSError, ValueError) as error:
        reason = "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be read: {error}"
        problems.append(Problem(str(file), line, "policies", f"the folder {folder} {reason}"))
        return {}
    files = {}
    for path in paths:
        if path.suffix == ".yml":
            problems.append(Problem(str(path), None, "", f"would be ignored: name it {path.stem}{SUFFIX}"))
        elif path.suffix == SUFFIX:
            if not is_name(path.stem):
                message = "its name cannot be the name of a policy: letters, digits, '.', '_' and '-' only"
                problems.append(Problem(str(path), None, "", message))
            files[path.stem] = read_policy(path)
    return files


def unknown_destinations(found: PolicyFile, known: Collection[str]) -> list[Problem]:
    """Destinations that a policy names and the configuration does not have."""
    return [] if found.node is None else limited(_unknown_destinations(found.node, found.path, known), found.path)


def _unknown_destinations(node: Node, path: Path, known: Collection[str]) -> Iterator[Problem]:
    for group in ("required", "others"):
        for number, name in _items(node, "destinations", group):
            if name not in known:
                message = f"no destination `{name}` in the configuration{suggestion(name, known)}"
                yield Problem(str(path), *line_and_name(node, ("destinations", group, number)), message)


def _retention_elsewhere(node: Node, path: Path) -> Iterator[Problem]:
    used = {name for group in ("required", "others") for _number, name in _items(node, "destinations", group)}
    for name in node.names("retention"):
        if used and name not in used:
            message = f"`{name}` is not among this policy's destinations{suggestion(name, used)}"
            yield Problem(str(path), *line_and_name(node, ("retention", name)), message)


def _contradictions(policy: Policy | None, node: Node, path: Path) -> list[Problem]:
    found = contradictions(policy) if policy is not None else []
    return [Problem(str(path), *line_and_name(node, one.location), one.message) for one in found]


def _unknown_policies(
    node: Node, sources: Sequence[Source], files: Mapping[str, PolicyFile]
) -> Iterator[tuple[str, Problem]]:
    """Names of policies that servers follow and that have no file, each with where it is written."""
    for source in sources:
        for server, tree in source.servers.items():
            named = tree.child("policy") if "policy" in tree.key_lines else None
            if named is not None and isinstance(named.value, str) and named.value not in files:
                yield named.value, source.problem(_no_policy(named.value, files), server, "policy")
    path = str(sources[0].path)
    for number, one in enumerate(_list(node.child("policies_by_label"))):
        named = one.child("policy")
        if named is not None and isinstance(named.value, str) and named.value not in files:
            where = line_and_name(node, ("policies_by_label", number, "policy"))
            yield named.value, Problem(path, *where, _no_policy(named.value, files))


def _no_policy(name: str, files: Mapping[str, PolicyFile]) -> str:
    return f"no policy `{name}` in the folder of policies{suggestion(name, files)}"


def _items(node: Node, *steps: str) -> list[tuple[int, str]]:
    return [(number, item.value) for number, item in enumerate(_list(node.at(*steps))) if isinstance(item.value, str)]


def _list(node: Node | None) -> list[Node]:
    return node.value if node is not None and isinstance(node.value, list) else []


def _children(node: Node) -> dict[str, Node]:
    return node.value if isinstance(node.value, dict) else {}


def _guess_folder(node: Node, path: Path, name: str, default: str = "policies") -> Path | None:
    """The folder that the field ``name`` names; None where that is none."""
    named = node.child(name)
    text = default if named is None else named.value
    try:
        return local_path(text, path.absolute().parent) if isinstance(text, str) else None
    except ValueError:
        return None
