"""The reference of both kinds of files, made from their schemas: `python -m policies.reference` writes the page."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from backupd.model.errors import UnknownNameError
from policies.configuration import Configuration
from policies.document import suggestion
from policies.fields import Section
from policies.policy import Policy

_EXAMPLES = Path(__file__).parent / "examples"

_PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"

_INTRODUCTION = """\
# Configuration

<!-- Made from policies/policy.py and policies/configuration.py by `python -m policies.reference`: change those. -->

The service reads one configuration file, `/etc/backupd/backupd.yaml` (or `--config FILE`, or `$BACKUPD_CONFIG`), files
with more servers in the folder `servers.d` beside it, and one file for each policy in the folder that it names. All are
YAML. All problems of all files are reported at once, with file and line; a name that is not in this reference is an
error.

* **size**: `500GiB`, `20MB`, `4096`; K, M, G, T, P alone are powers of 1024.
* **duration**: `50ms`, `10s`, `15m`, `2h`, `7d`, `1d12h`.
* **cron expression**: minute, hour, day of the month, month, day of the week, in quotes: `"0 2 * * sun"`.
  Weekdays are names or 0 (Sunday) to 6; where both days are given either suffices, as in crontab(5).
* **interval**: `every 6h`, at least a minute; counted from a fixed moment, so that a restart shifts nothing.
* **time window**: `08:00-18:00`, `mon-fri 08:00-18:00`, `sat,sun 00:00-24:00`; `22:00-04:00` ends on the next day.
* **target**: `latest`, `random`, `backup:ID`, a time with its offset, `gtid:...`, `before-gtid:...` or `FILE:POS`.
* **path**: a relative path starts at the folder of the file that it is written in.
* **name**: letters, digits, `.`, `_` and `-`, at most 63, the first a letter or digit.
* **Secrets** are never written here: name a file that only the service can read.

**Whoever may write these files is root on this host.** The programs of `hooks` run as the user of the service,
and `config_files` are read as that user and stored. Let root alone write them; neither the REST interface nor the web
page can.
"""


def reference() -> str:
    """The whole page, in Markdown."""
    blocks = [
        _INTRODUCTION,
        "## The configuration file\n",
        f"```yaml\n{example('backupd')}```\n",
        *_sections(Configuration),
        "## A policy\n",
        f"```yaml\n{example('gold')}```\n",
        *_sections(Policy),
        "## Examples of policies\n",
        "`backupd policy example NAME` prints these:\n",
        *(f"### {name}\n\n```yaml\n{example(name)}```\n" for name in example_names() if name != "backupd"),
    ]
    return "\n".join(blocks)


def example_names() -> tuple[str, ...]:
    """``backupd`` is the example of a configuration, all others are policies."""
    return tuple(sorted(path.stem for path in _EXAMPLES.glob("*.yaml")))


def example(name: str) -> str:
    """The text of an example. Raises UnknownNameError."""
    if name not in example_names():
        raise UnknownNameError(
            f"there is no example {name!r}{suggestion(name, example_names())}",
            hint=f"there are: {', '.join(example_names())}",
        )
    return (_EXAMPLES / f"{name}.yaml").read_text(encoding="utf-8")


def policy_schema() -> dict[str, Any]:
    """The JSON schema of a policy, for editors."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Policy.model_json_schema()}


def _sections(model: type[Section]) -> Iterator[str]:
    schema = model.model_json_schema()
    definitions: Mapping[str, Any] = schema.get("$defs", {})
    yield from _section("", schema, definitions)


def _section(path: str, schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> Iterator[str]:
    if path:
        yield f"### {path}\n"
        yield f"{' '.join(schema.get('description', '').split())}\n"
    required = set(schema.get("required", ()))
    yield "| name | what | by default |\n|---|---|---|\n" + "".join(
        _row(name, field, definitions, required=name in required) for name, field in schema["properties"].items()
    )
    for name, field in schema["properties"].items():
        for suffix, inner in _inner(field, definitions):
            yield from _section(f"{path}.{name}{suffix}" if path else f"{name}{suffix}", inner, definitions)


def _row(name: str, field: Mapping[str, Any], definitions: Mapping[str, Any], *, required: bool) -> str:
    default = field.get("default")
    if required:
        shown = "**required**"
    else:
        shown = "" if default in (None, [], "") else f"`{default if isinstance(default, str) else json.dumps(default)}`"
    words = field.get("description", "")
    if isinstance(field.get("const"), str):
        words = f"{words} `{field['const']}`."
    elif examples := field.get("examples"):
        words = f"{words} For example {' or '.join(f'`{_yaml(example)}`' for example in examples)}."
    kind = _kind(field, definitions)
    return f"| `{name}` | {kind}{'. ' if kind else ''}{words} | {shown} |\n"


def _yaml(value: object) -> str:
    if isinstance(value, list):
        return f"[{', '.join(json.dumps(v) if set(str(v)) & set('*:,') else str(v) for v in value)}]"
    return json.dumps(value) if not isinstance(value, str) or value.startswith("*") else value


def _kind(field: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    variants = [variant for variant in field.get("anyOf", [field]) if variant.get("type") != "null"]
    first = variants[0]
    if "enum" in first:
        return "one of " + ", ".join(f"`{value}`" for value in first["enum"])
    if first.get("type") == "array":
        inner = _kind(first["items"], definitions)
        return f"list of {inner}{'es' if inner.endswith('s') else 's'}" if inner else "list"
    if first.get("type") == "object" or "$ref" in first or "oneOf" in first:
        return ""
    names = {"string": "text", "integer": "whole number", "boolean": "true or false", "number": "number"}
    return str(first.get("format") or names.get(str(first.get("type")), ""))


def _inner(field: Mapping[str, Any], definitions: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The sections inside a field, each with what its path gets behind the field's name."""
    for variant in field.get("anyOf", [field]):
        if "$ref" in variant:
            yield "", _definition(variant, definitions)
        elif variant.get("type") == "array" and "$ref" in variant.get("items", {}):
            yield "[]", _definition(variant["items"], definitions)
        elif isinstance(values := variant.get("additionalProperties"), dict):
            if "oneOf" in values:
                for reference_ in values["oneOf"]:
                    inner = _definition(reference_, definitions)
                    yield f".NAME ({inner['properties']['type']['const']})", inner
            elif "$ref" in values:
                yield ".NAME", _definition(values, definitions)


def _definition(reference_: Mapping[str, Any], definitions: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = definitions[str(reference_["$ref"]).rsplit("/", 1)[-1]]
    return found


def main(arguments: list[str]) -> int:
    """`python -m policies.reference [FILE]`: write the page, by default to docs/configuration.md; `-` prints it."""
    parser = argparse.ArgumentParser(prog="python -m policies.reference", description="Write the page of all settings.")
    parser.add_argument("file", nargs="?", default=str(_PAGE), help="default: docs/configuration.md; - prints it")
    target = parser.parse_args(arguments).file
    if target == "-":
        sys.stdout.write(reference())
        return 0
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    Path(target).write_text(reference(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
