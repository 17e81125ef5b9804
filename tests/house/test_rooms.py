"""The shape of the house: how many files a folder holds, how long a file may be, and that tests stand where their
modules do."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from tests.house.defined import PACKAGES, ROOT

MOST_FILES = 16
LONG = 600
REASONS = {
    "backupd/binlog/spool_files.py": "the spool: its lock, its files, and what is said of them, in one state",
    "backupd/binlog/supervisor.py": "one stream, and everything that may end a connection of it",
}
"""Why a file is longer than 600 lines. A file that no longer is has no line here."""


def _modules(*folders: str) -> list[Path]:
    return [path for folder in folders for path in (ROOT / folder).rglob("*.py") if path.name != "__init__.py"]


def test_a_folder_holds_16_files_at_most() -> None:
    counts = Counter(path.parent.relative_to(ROOT) for path in _modules(*PACKAGES, "tests", "alembic", "bench"))
    del counts[Path("alembic/versions")]  # one file per migration that was ever released
    assert {str(folder): count for folder, count in counts.items() if count > MOST_FILES} == {}


def test_a_long_file_has_a_reason() -> None:
    lengths = {
        str(path.relative_to(ROOT)): path.read_text().count("\n") for path in _modules(*PACKAGES, "tests", "alembic")
    }
    assert {path for path, lines in lengths.items() if lines > LONG} == set(REASONS)


@pytest.mark.parametrize("package", PACKAGES)
def test_unit_tests_stand_in_the_package_of_what_they_test(package: str) -> None:
    top = ROOT / "tests" / "unit"
    base = top if package == "backupd" else top / package
    strangers = [
        str(folder.relative_to(ROOT))
        for folder in base.rglob("*")
        if any(folder.glob("test_*.py"))
        and (package != "backupd" or folder.relative_to(top).parts[0] not in {*PACKAGES, "support"})
        and not (ROOT / package / folder.relative_to(base)).is_dir()
    ]
    assert strangers == []


def test_the_map_names_every_room() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    rooms = {
        str(path.parent.relative_to(ROOT)) for package in PACKAGES for path in (ROOT / package).rglob("__init__.py")
    }
    assert {room for room in rooms - {"backupd"} if f"`{room}`" not in page} == set()


def test_documents_name_files_and_rooms_that_are_there() -> None:
    files = {
        str(path.relative_to(ROOT))
        for package in (*PACKAGES, "tests", "bench", "scripts")
        for path in (ROOT / package).rglob("*.py")
    }
    gone = [
        f"{document.relative_to(ROOT)}: {name}"
        for document in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md"))
        if document.name != "house.md"  # the record of what was where
        for name in re.findall(r"`([\w/]+\.py)`", document.read_text())
        if not any(file == name or file.endswith(f"/{name}") for file in files)
    ]
    gone += [
        f"{document.relative_to(ROOT)}: {name}"
        for document in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md"))
        if document.name != "house.md"
        for name in re.findall(
            r"`((?:backupd|api|storage|restore|policies|tests|scripts|bench)/[\w/]+)`", document.read_text()
        )
        if not (ROOT / name).exists() and not (ROOT / f"{name}.py").exists()
    ]
    assert gone == []
