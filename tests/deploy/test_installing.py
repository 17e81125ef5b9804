"""docs/installing.md and the files it names say only what is so."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import typer

from backupd.app.context.settings import Settings, load_settings
from backupd.cli.main import app
from backupd.engine.server.sandbox import MAKE_WORKER, WORKER
from tests.support.service.systemd_unit import service, writable

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "installing.md").read_text()
OPERATIONS = sorted((ROOT / "docs" / "operations").glob("*.md"))
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]+))?\)")
BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


def blocks(kind: str) -> Iterator[str]:
    for indent, found, text in BLOCK.findall(GUIDE):
        if found == kind:
            yield re.sub(f"^{indent}", "", text, flags=re.MULTILINE)


def test_every_configuration_in_it_is_valid_with_its_policy(tmp_path: Path) -> None:
    pairs = [text for text in blocks("yaml") if text.startswith("# /etc/backupd/")]
    assert len(pairs) == 4
    for number in (0, 2):
        home = tmp_path / str(number)
        for text in pairs[number : number + 2]:
            name = text.partition("\n")[0].removeprefix("# /etc/backupd/")
            (home / name).parent.mkdir(parents=True, exist_ok=True)
            (home / name).write_text(text.replace("/etc/backupd", str(home)))
        settings = load_settings(home / "backupd.yaml")
        for server in settings.servers:
            found = settings.server(server)
            assert found.usable
            assert {*found.required, *found.others} == set(settings.destinations)
            assert (found.policy.test_restore is None) is (found.policy.physical is None), "of dumps nothing is tested"
        _can_restore(settings)


def _can_restore(settings: Settings) -> None:
    """With a key that backups are sealed for, into a folder that the unit may write to."""
    restore = settings.needs_restore()
    made = re.findall(r"--homedir (\S+) [^\n]*\\\n *--quick-generate-key (\S+)", GUIDE)
    assert [(Path(home).name, key) for home, key in made] == [
        (restore.gnupg_home.name, settings.encryption.recipients[-1])
    ]
    assert restore.gnupg_home != settings.encryption.gnupg_home
    for path in (*restore.folders, restore.scratch.path, settings.spool):
        assert any(path.is_relative_to(folder) for folder in writable()), path
    assert restore.folders


def test_the_readme_leads_to_restores_too(tmp_path: Path) -> None:
    (text,) = re.findall(
        r"^   # /etc/backupd/backupd.yaml\n(.*?)^   ```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL
    )
    (policy,) = re.findall(
        r"^   # /etc/backupd/policies/first.yaml\n(.*?)^   ```$",
        (ROOT / "README.md").read_text(),
        re.MULTILINE | re.DOTALL,
    )
    (tmp_path / "policies").mkdir()
    (tmp_path / "policies" / "first.yaml").write_text(policy)
    (tmp_path / "backupd.yaml").write_text(dedent(text).replace("/etc/backupd", str(tmp_path)))
    _can_restore(load_settings(tmp_path / "backupd.yaml"))


def test_the_section_that_lets_others_in_is_valid_beside_the_rest(tmp_path: Path) -> None:
    whole = next(text for text in blocks("yaml") if text.startswith("# /etc/backupd/backupd.yaml"))
    policy = next(text for text in blocks("yaml") if text.startswith("# /etc/backupd/policies/shop.yaml"))
    part = next(text for text in blocks("yaml") if text.startswith("# in /etc/backupd/backupd.yaml"))
    (tmp_path / "policies").mkdir()
    (tmp_path / "policies" / "shop.yaml").write_text(policy)
    (tmp_path / "backupd.yaml").write_text((whole + part).replace("/etc/backupd", str(tmp_path)))
    assert load_settings(tmp_path / "backupd.yaml").api.listen == "0.0.0.0:8642"


def test_every_command_in_it_and_in_the_alerts_is_one_that_there_is() -> None:
    texts = [
        *blocks(""),
        *(text for page in (GUIDE, *(page.read_text() for page in OPERATIONS)) for text in _quoted(page)),
        *re.findall(r"`(backupd [^`]+)`", (ROOT / "deploy" / "prometheus-rules.yml").read_text()),
        *re.findall(r"backupd token create.*", (ROOT / "docker-compose.yml").read_text()),
    ]
    commands = [
        line.partition("#")[0].split()
        for text in texts
        for line in text.splitlines()
        if re.match(r"(docker compose exec backupd )?backupd ", line)
    ]
    assert len(commands) > 15
    tree = typer.main.get_command(app)
    for words in commands:
        _is_command(tree, [word for word in words if word not in ("docker", "compose", "exec")])


def _quoted(page: str) -> list[str]:
    fenced = [dedent(text) for _indent, kind, text in BLOCK.findall(page) if kind in {"", "sh"}]
    return [*re.findall(r"`(backupd [^`]+)`", page), *fenced]


def _is_command(command: Any, words: list[str]) -> None:
    """Down the tree of commands as far as their names go; then every option must be one of that command."""
    rest = [word for word in words if word != "backupd"]
    assert rest[0] in command.commands, words
    while rest and rest[0] in (inner := getattr(command, "commands", {})):
        command = inner[rest.pop(0)]
    known = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in rest if word.startswith("--")} <= known, words


def test_every_file_that_it_names_is_there() -> None:
    for path in re.findall(r"`((?:deploy|scripts)/[\w.-]+)`", GUIDE):
        assert (ROOT / path).exists(), path


def test_every_link_of_the_documents_leads_somewhere() -> None:
    broken = []
    for document in DOCUMENTS:
        for path, anchor in LINK.findall(document.read_text()):
            there = (document.parent / path).resolve() if path else document
            if not there.exists() or (anchor and anchor not in anchors_of(there)):
                broken.append(f"{document.relative_to(ROOT)}: {path}#{anchor}")
    assert broken == []


def anchors_of(document: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-") for title in titles}


def test_every_folder_that_the_unit_may_write_to_is_made() -> None:
    folders = service()["ReadWritePaths"]
    made = {word for line in GUIDE.splitlines() if line.startswith("install -d") for word in line.split()}
    assert {folder.removeprefix("-") for folder in folders.split()} <= made


def test_the_image_holds_what_setup_would_install() -> None:
    image = (ROOT / "Dockerfile").read_text()
    (needs,) = re.findall(r'^needs="([^"]*)"$', (ROOT / "scripts" / "setup").read_text(), re.MULTILINE)[:1]
    packages = {line.partition("|")[2] for line in needs.splitlines()}
    assert packages <= set(image.split()), "the container needs what a host needs"


def test_setup_and_the_image_make_the_user_that_the_guide_and_the_program_name() -> None:
    image, setup = ((ROOT / name).read_text() for name in ("Dockerfile", "scripts/setup"))
    assert MAKE_WORKER in image
    assert f"{MAKE_WORKER}\n" in list(blocks(""))
    assert MAKE_WORKER.replace(WORKER, '"$1"') in setup
    assert f"\nmake_user {WORKER}\n" in setup
