"""``backupd completion``: the script that a shell loads; and ``backupd complete``, which that script calls at each Tab.

The answer comes from the commands themselves, from the names in the configuration file, and from the ids in a catalog
that is a file: no server and no destination is asked. Whatever goes wrong gives no words: a prompt is no place for
messages.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import typer

from backupd.cli.commands.backups import ListByDefault
from backupd.cli.session import CONFIG_VARIABLE, DEFAULT_CONFIG, Run

SHELLS = ("bash", "zsh", "fish")
FILES = 3
"""Exit status for a word that is the name of a file, which the shell itself completes."""
_MOST = 500
"""Ids that are offered, the newest."""
_PATHS = ("FILE", "DIR", "FILE...")
_CATALOG = "sqlite:////var/lib/backupd/catalog.db"


def completion(
    run: Run, shell: Annotated[str, typer.Argument(metavar="bash|zsh|fish", help="Which shell.", parser=str)]
) -> None:
    """Print the script that lets a shell complete commands, options, servers, destinations and ids of backups.

    To load it: `source <(backupd completion bash)` in ~/.bashrc, the same with zsh in ~/.zshrc; `backupd completion
    fish > ~/.config/fish/completions/backupd.fish`.
    """
    if shell not in SHELLS:
        raise typer.BadParameter(f"{shell!r} is not known; known: {', '.join(SHELLS)}")
    run.screen.text(script(shell))


def script(shell: str) -> str:
    """What ``shell`` loads."""
    return files("backupd.cli").joinpath(f"completion.{shell}").read_text(encoding="utf-8")


def complete(
    run: Run,
    shell: Annotated[str, typer.Argument(metavar="SHELL")],
    words: Annotated[list[str], typer.Argument(metavar="WORD...")],
) -> None:
    """Print what the last word of a command line may become. The script of `backupd completion` calls this."""
    found: dict[str, str] | None = {}
    cut = 0
    with suppress(Exception):
        breaks = ""
        if shell == "bash":  # which splits words at more than spaces, and replaces what is behind the last such place
            breaks, line = words
            words = _split(line)
        *before, last = words
        cut = max((last.rfind(char) for char in breaks), default=-1) + 1
        found = answer(run.root, before, last)
    if found is None:
        raise typer.Exit(FILES)
    if found:
        run.screen.text("\n".join(_LINES[shell](word[cut:], about) for word, about in found.items()))


def _split(line: str) -> list[str]:
    """The words behind the first one, the last of them as far as it is typed."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=False)
    lexer.whitespace_split, lexer.commenters = True, ""
    found: list[str] = []
    try:
        found.extend(lexer)
    except ValueError:  # within quotes
        found.append(lexer.token)
    else:
        if line[-1:].isspace():
            found.append("")
    return found[1:]


_LINES: Mapping[str, Callable[[str, str], str]] = {
    "bash": lambda word, _about: word,
    "zsh": lambda word, about: word.replace("\\", "\\\\").replace(":", "\\:") + (f":{about}" if about else ""),
    "fish": lambda word, about: word + (f"\t{about}" if about else ""),
}


@dataclass
class _Typed:
    """What was typed before the word that is completed: the ``command`` (or group), its arguments, the option that
    waits for its value, the options that were given, and the values of all."""

    command: Any
    arguments: list[str] = field(default_factory=list)
    awaiting: Any = None
    given: set[str] = field(default_factory=set)
    values: dict[str, str] = field(default_factory=dict)
    ended: bool = False
    """``--`` was typed: no options follow."""


def answer(root: Any, before: Sequence[str], last: str) -> dict[str, str] | None:
    """What ``last`` may become after these words, each with a few words about it; None where it names a file.
    ``root``: the group of all commands."""
    typed = _read(root, before)
    names = _Names(typed)
    name, equals, value = last.partition("=")
    if not typed.ended and typed.awaiting is None and last.startswith("-"):
        if not equals:
            return _options(typed, last)
        option = _option(typed.command, name)
        found = _values(names, option, value) if option is not None else {}
        return None if found is None else {f"{name}={word}": about for word, about in found.items()}
    if typed.awaiting is not None:
        return _values(names, typed.awaiting, last)
    return _words(typed, names, last)


def _read(root: Any, before: Sequence[str]) -> _Typed:
    typed = _Typed(root)
    for word in before:
        if typed.awaiting is not None:
            typed.values[typed.awaiting.name] = word
            typed.awaiting = None
        elif word == "--" and not typed.ended:
            typed.ended = True
        elif word.startswith("-") and not typed.ended:
            name, equals, value = word.partition("=")
            option = _option(typed.command, name)
            typed.given.add(name)
            if option is not None and not option.is_flag:
                if equals:
                    typed.values[option.name] = value
                else:
                    typed.awaiting = option
        elif not typed.arguments and (inner := _inner(typed.command, word)) is not None:
            typed.command = inner
            typed.given.clear()
        else:
            if not typed.arguments and isinstance(typed.command, ListByDefault):
                typed.command = typed.command.commands["list"]
            typed.arguments.append(word)
    for argument, word in zip(_arguments(typed.command), typed.arguments, strict=False):
        typed.values[argument.name] = word
    return typed


def _inner(command: Any, word: str) -> Any:
    commands = getattr(command, "commands", None)
    return commands[word] if commands is not None and word in commands else None


def _arguments(command: Any) -> list[Any]:
    return [one for one in command.params if one.param_type_name == "argument"]


def _all_options(command: Any) -> Iterator[Any]:
    of_list = command.commands["list"].params if isinstance(command, ListByDefault) else ()
    for one in (*command.params, *of_list):
        if one.param_type_name == "option" and not one.hidden:
            yield one


def _option(command: Any, name: str) -> Any:
    return next((one for one in _all_options(command) if name in one.opts), None)


def _options(typed: _Typed, last: str) -> dict[str, str]:
    found = {
        name: one.help or ""
        for one in _all_options(typed.command)
        if one.multiple or not typed.given & set(one.opts)
        for name in one.opts
    }
    found["--help"] = "Show this message and exit."
    return {name: about for name, about in found.items() if name.startswith(last)}


def _words(typed: _Typed, names: _Names, last: str) -> dict[str, str] | None:
    """The commands of a group, and what the next argument may be."""
    command, found = typed.command, dict[str, str]()
    if not typed.arguments and hasattr(command, "commands"):
        hidden = getattr(command, "hidden_names", ())
        found = {name: "" for name in command.commands if name.startswith(last) and name not in hidden}
        if not isinstance(command, ListByDefault):
            return found
        command = command.commands["list"]
    arguments = _arguments(command)
    place = min(len(typed.arguments), len(arguments) - 1)
    if place < 0 or (len(typed.arguments) > place and arguments[place].nargs != -1):
        return found
    values = _values(names, arguments[place], last)
    return None if values is None else found | values


def _values(names: _Names, parameter: Any, last: str) -> dict[str, str] | None:
    """What a parameter takes; None for the name of a file."""
    if (parameter.metavar or "").removeprefix("[").removesuffix("]") in _PATHS:
        return None
    if parameter.name == "shell":
        known: Sequence[str] = SHELLS
    else:
        known = names.of(parameter) or [one.value for one in parameter.shell_complete(None, "")]
    return {word: "" for word in known if word.startswith(last)}


class _Names:
    """What is in the configuration file and in the catalog, read when it is asked for."""

    def __init__(self, typed: _Typed) -> None:
        self._typed = typed

    def of(self, parameter: Any) -> Sequence[str]:
        """Those that this parameter takes; none where it takes no name."""
        match parameter.name, (parameter.metavar or "").strip("[]"):
            case ("server" | "into", _):
                return sorted(self._servers)
            case (_, "DESTINATION"):
                return sorted(self._section("destinations"))
            case ("backup_id", _):
                return self._ids("backups")
            case ("job_id", _):
                return self._ids("jobs")
            case ("target", _):
                return ["latest", *(f"backup:{one}" for one in self._ids("backups"))]
            case _:
                return ()

    def _ids(self, what: str) -> Sequence[str]:
        from backupd.catalog.tables.ids import newest_ids

        url = self._document.get("catalog", _CATALOG)
        return newest_ids(str(url), what, self._typed.values.get("server", ""), _MOST, folder=self._file.parent)

    @cached_property
    def _file(self) -> Path:
        return Path(self._typed.values.get("config") or os.environ.get(CONFIG_VARIABLE) or DEFAULT_CONFIG).absolute()

    @cached_property
    def _document(self) -> Mapping[str, Any]:
        return _mapping(self._file)

    def _section(self, name: str) -> Mapping[str, Any]:
        found = self._document.get(name)
        return found if isinstance(found, dict) else {}

    @property
    def _servers(self) -> Iterator[str]:
        entries = dict(self._section("servers"))
        folder = self._file.parent / str(self._document.get("servers_folder") or "servers.d")
        for file in sorted(folder.glob("*.yaml")):
            entries |= _mapping(file)
        members = {
            str(name)
            for one in entries.values()
            if isinstance(one, dict) and isinstance(one.get("members"), list)
            for name in one["members"]
        }
        return (str(name) for name in entries if name not in members)


def _mapping(file: Path) -> Mapping[str, Any]:
    """What is written in a file, not checked; empty where it cannot be read."""
    import yaml

    loader: type[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        found = yaml.load(file.read_bytes(), Loader=loader)  # noqa: S506  one of the two that make nothing but values
    except (OSError, yaml.YAMLError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
