"""The migrations travel with the package."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from backupd.catalog.migrations import head

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The content of a wheel built from a copy of the tree: what a user gets, without a path back to the tree."""
    tree = tmp_path_factory.mktemp("tree")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    shutil.copy(ROOT / "pyproject.toml", tree)
    (tree / str(project["project"]["readme"])).write_text("# backupd\n", encoding="utf-8")
    for name in ("backupd", "api", "policies", "restore", "storage", "alembic"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    built = subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--quiet",
            "--no-deps",
            "--no-build-isolation",
            "--wheel-dir",
            tree / "dist",
            tree,
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    with zipfile.ZipFile(next((tree / "dist").glob("*.whl"))) as wheel:
        wheel.extractall(tree / "site")
    return tree / "site"


def _run(installed: Path, code: str, *arguments: str) -> str:
    # -P: the folder that the tests run in must not be searched. The wheel comes before the editable installation.
    done = subprocess.run(
        [
            sys.executable,
            "-P",
            "-c",
            f"import sys; sys.path.insert(0, sys.argv[1])\n{code}",
            str(installed),
            *arguments,
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=installed.parent,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_installed_package_makes_its_catalog(installed: Path, tmp_path: Path) -> None:
    out = _run(
        installed,
        "from backupd.catalog import session\nfrom backupd.catalog import migrations\n"
        "print(migrations.scripts(), session.upgrade(sys.argv[2]))",
        f"sqlite:///{tmp_path}/c.db",
    )
    assert out.startswith(f"{installed}/backupd/catalog/")
    assert f"(None, '{head()}')" in out


def test_an_installed_package_has_the_examples(installed: Path) -> None:
    out = _run(installed, "import policies.reference as r; print(r.__file__, *r.example_names())")
    assert out.split() == [f"{installed}/policies/reference.py", "backupd", "gold", "physical-only", "weekly-logical"]


def test_an_installed_package_has_every_module_and_every_file_beside_them(installed: Path) -> None:
    """An editable installation would hide what the list of packages lacks."""
    names, files = [], []
    for package in ("backupd", "api", "policies", "restore", "storage"):
        for path in (ROOT / package).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                files.append(path.relative_to(ROOT))
                if path.suffix == ".py" and path.name != "__main__.py":
                    names.append(".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"))
    assert [str(path) for path in files if not (installed / path).is_file()] == []
    assert len(names) > 300
    out = _run(
        installed,
        "import importlib\n"
        "found = [importlib.import_module(name).__file__ for name in sys.argv[2:]]\n"
        "print(*(file for file in found if not file.startswith(sys.argv[1])))",
        *names,
    )
    assert out.split() == []
    pages = sorted((ROOT / "api" / "web" / "templates").glob("*.html"))
    out = _run(
        installed,
        "from api.web import site\nprint(*(site._TEMPLATES.get_template(name).filename for name in sys.argv[2:]))",
        *(page.name for page in pages),
    )
    assert len(out.split()) == len(pages)
    assert all(file.startswith(str(installed)) for file in out.split())
