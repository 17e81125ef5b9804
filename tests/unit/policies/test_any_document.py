"""Whatever is in the files: values, or one ConfigurationError."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backupd.model.errors import ConfigurationError
from policies.configuration import Configuration
from policies.load import load
from policies.policy import Policy
from tests.support.catalog.configuration_files import CONFIGURATION, POLICY
from tests.support.policies import load_policy

_SETTINGS = settings(
    max_examples=80,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def _names(schema: dict[str, Any]) -> set[str]:
    sections = [schema, *schema.get("$defs", {}).values()]
    return {name for section in sections for name in section.get("properties", {})}


_KNOWN = sorted(
    _names(Policy.model_json_schema()) | _names(Configuration.model_json_schema()) | {"local", "gold", "db1"}
)
_WORDS = [
    "filesystem",
    "s3",
    "sftp",
    "local",
    "gold",
    "0 2 * * sun",
    "10s",
    "2GiB",
    "/srv",
    "../x",
    "",
    "~",
    "é",
    "sqlite:////x",
    "postgresql://a@b/c",
    "\x00",
    "a\nb",
    "smtp://h:x",
    "h:1",
    "a@b",
    "shop.*",
    "{target}",
    "9" * 5000,
]

_scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(_WORDS)
_keys = st.sampled_from(_KNOWN) | st.text(max_size=4)
_values = st.recursive(
    _scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_keys, inner, max_size=5), max_leaves=25
)


def _load_both(folder: Path, configuration: bytes, policy: bytes) -> None:
    (folder / "policies").mkdir(exist_ok=True)
    (folder / "policies" / "gold.yaml").write_bytes(policy)
    (folder / "backupd.yaml").write_bytes(configuration)
    for attempt in (lambda: load(folder / "backupd.yaml"), lambda: load_policy(folder / "policies" / "gold.yaml")):
        found = _error_of(attempt)
        if found is not None:
            assert found.problems
            assert all(problem.message and "\n" not in problem.message for problem in found.problems)
            assert str(found).encode("utf-8")


def _error_of(attempt: Callable[[], object]) -> ConfigurationError | None:
    try:
        attempt()
    except ConfigurationError as error:
        return error
    return None


def _dump(value: object, path: Path) -> bytes:
    with path.open("w", encoding="utf-8") as stream:
        yaml.safe_dump(value, stream)
    return path.read_bytes()


@_SETTINGS
@given(raw=st.binary(max_size=200))
def test_random_bytes(tmp_path: Path, raw: bytes) -> None:
    _load_both(tmp_path, raw, raw)


@_SETTINGS
@given(text=st.text(alphabet=st.sampled_from("ab:-?*&!%@|>{}[]\"'\\#,~< \n\t\r0x.\u2028é\ufeff"), max_size=60))
def test_random_yaml_syntax(tmp_path: Path, text: str) -> None:
    raw = text.encode("utf-8")
    _load_both(tmp_path, raw, raw)


@_SETTINGS
@given(value=st.dictionaries(_keys, _values, max_size=8))
def test_random_structures(tmp_path: Path, value: dict[str, Any]) -> None:
    with contextlib.suppress(UnicodeEncodeError):
        raw = _dump(value, tmp_path / "dumped")
        _load_both(tmp_path, raw, raw)


@_SETTINGS
@given(data=st.data())
def test_good_files_with_a_piece_changed(tmp_path: Path, data: st.DataObject) -> None:
    texts = []
    for text in (CONFIGURATION, POLICY):
        start = data.draw(st.integers(0, len(text)))
        end = data.draw(st.integers(start, min(len(text), start + 10)))
        piece = data.draw(st.text(max_size=5) | st.sampled_from(_WORDS + _KNOWN))
        texts.append((text[:start] + piece + text[end:]).encode("utf-8", "surrogatepass"))
    _load_both(tmp_path, *texts)
