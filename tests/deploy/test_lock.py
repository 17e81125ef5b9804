"""The lock files: what is installed is what they name, by SHA-256; they name no registry."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

TREE = Path(__file__).parents[2]
LOCKS = ("requirements.lock", "requirements-dev.lock")
_PIN = re.compile(
    r"^([A-Za-z0-9._-]+)(?:\[[^\]]*\])?==(\S+)( ; [^\\]*)?((?: \\\n    --hash=sha256:[0-9a-f]{64})+)$", re.MULTILINE
)


def pins(name: str) -> dict[str, list[tuple[str, str]]]:
    """By package: version and marker ("" for none)."""
    found: dict[str, list[tuple[str, str]]] = {}
    text = (TREE / name).read_text()
    for match in _PIN.finditer(text):
        marker = (match[3] or "").removeprefix(" ; ").strip()
        found.setdefault(canonicalize_name(match[1]), []).append((match[2], marker))
    assert _PIN.sub("", text).strip() == "", "every line of a lock is a package of one version with its hashes"
    return found


def wanted(extras: tuple[str, ...]) -> list[Requirement]:
    project = tomllib.loads((TREE / "pyproject.toml").read_text())
    lines = [*project["project"]["dependencies"], *project["build-system"]["requires"]]
    for extra in extras:
        lines += project["project"]["optional-dependencies"][extra]
    return [one for one in map(Requirement, lines) if one.name != "backupd"]


@pytest.mark.parametrize(
    ("name", "extras"),
    [("requirements.lock", ("channels", "postgresql")), ("requirements-dev.lock", ("channels", "postgresql", "dev"))],
)
def test_a_lock_holds_every_requirement_in_a_version_that_is_allowed(name: str, extras: tuple[str, ...]) -> None:
    locked = pins(name)
    for one in wanted(extras):
        versions = locked.get(canonicalize_name(one.name), [])
        assert versions, f"{name} lacks {one}: run scripts/lock --keep"
        assert all(one.specifier.contains(found) for found, _ in versions), f"{name} does not fit {one}"


def test_both_locks_agree() -> None:
    small, large = map(pins, LOCKS)
    assert {name: found for name, found in large.items() if name in small} == small


def test_what_runs_here_is_what_the_lock_names() -> None:
    for name, versions in pins("requirements-dev.lock").items():
        if len(versions) == 1 and not versions[0][1]:
            try:
                installed = version(name)
            except PackageNotFoundError:
                installed = "not at all"
            assert installed == versions[0][0], f"{name} is installed {installed}: run scripts/setup --test"


@pytest.mark.parametrize("name", ["scripts/setup", "Dockerfile"])
def test_whoever_installs_asks_for_the_hashes(name: str) -> None:
    text = (TREE / name).read_text()
    installs = [line for line in text.splitlines() if "pip install" in line]
    assert installs
    assert all("--require-hashes" in line or "--no-deps --no-build-isolation" in line for line in installs)


def test_every_image_is_named_by_version_and_digest() -> None:
    """What is built and started from images is the bytes that were meant; our own image is built here."""
    named = re.findall(r"^FROM (\S+)", (TREE / "Dockerfile").read_text(), re.MULTILINE)
    named += re.findall(r"^ +image: (\S+)", (TREE / "docker-compose.yml").read_text(), re.MULTILINE)
    assert len(named) == 7
    pinned = re.compile(r"[a-z/-]+:[A-Za-z0-9.-]*[0-9][A-Za-z0-9.-]*@sha256:[0-9a-f]{64}")
    assert [one for one in named if not pinned.fullmatch(one)] == ["backupd"]
