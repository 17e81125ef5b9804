"""docker-compose.yml and Dockerfile say what backupd takes: every setting in them is read as the service reads it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from backupd.app.context.settings import Settings, load_settings
from backupd.engine.sql.client import Connection

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docker-compose.yml"
SECRETS = {"MARIADB_BACKUP_PASSWORD": "pass1word", "S3_SECRET_KEY": "secret2key"}
VARIABLE = re.compile(r"\$\{(\w+)(?::\?[^}]*)?\}")


def document() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(FILE.read_text())
    return found


def filled(text: str) -> str:
    return VARIABLE.sub(lambda found: SECRETS[found[1]], text)


def files_of(service: str) -> dict[str, str]:
    """What the service finds, by path."""
    everything = document()
    found = {}
    for mounted in everything["services"][service].get("configs", ()):
        source = everything["configs"][mounted["source"]]
        found[mounted["target"]] = (
            filled(source["content"]) if "content" in source else (ROOT / source["file"]).read_text()
        )
    return found


def settings_in(folder: Path) -> Settings:
    """As the service in the container reads them: its files lie in ``folder`` here."""
    here = str(folder / "etc")
    for path, text in files_of("backupd").items():
        file = Path(path.replace("/etc/backupd", here))
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text.replace("/etc/backupd", here))
    return load_settings(folder / "etc" / "backupd.yaml")


def test_the_configuration_and_the_policy_are_valid_and_every_server_can_be_asked(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    server = settings.server("shop-db1")
    assert server.usable
    assert {*server.required, *server.others} == set(settings.destinations) == {"local", "objects"}
    connection = server.connection()
    assert isinstance(connection, Connection)
    assert (connection.user, connection.password) == ("backupd", SECRETS["MARIADB_BACKUP_PASSWORD"])


def test_what_the_service_keeps_lies_on_volumes(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    mounts = [volume.split(":")[1] for volume in document()["services"]["backupd"]["volumes"]]
    kept = [
        settings.catalog.removeprefix("sqlite:///"),
        str(settings.spool),
        "/srv/backups/repository",
        str(settings.server("shop-db1").config.socket),
        "/etc/backupd/gnupg",
    ]
    restore = settings.needs_restore()
    kept += [str(restore.scratch.path), f"/etc/backupd/{restore.gnupg_home.name}", *map(str, restore.folders)]
    assert restore.folders
    assert settings.server("shop-db1").policy.test_restore is not None
    assert [path for path in kept if not any(path.startswith(mount) for mount in mounts)] == []
    assert "datadir:/var/lib/mysql:ro" in document()["services"]["backupd"]["volumes"], "nothing there is changed"


def test_the_keys_are_made_as_it_says_for_whom_it_seals(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    mounted = dict(volume.split(":")[:2] for volume in document()["services"]["backupd"]["volumes"])
    for text in (FILE.read_text(), (ROOT / "docs" / "installing.md").read_text()):
        ((home, key),) = re.findall(r'--homedir "\$PWD/(\S+)" .*--quick-generate-key (\S+)', text)
        assert (key,) == settings.encryption.recipients
        assert mounted[f"./{home}"] == f"/etc/backupd/{settings.needs_restore().gnupg_home.name}"


def test_every_name_in_it_is_declared_in_it(tmp_path: Path) -> None:
    everything = document()
    services = everything["services"]
    assert set(services) == {"database", "bucket", "objects", "mail", "backupd", "prometheus"}
    volumes = {volume.split(":")[0] for one in services.values() for volume in one.get("volumes", ())}
    assert {name for name in volumes if not name.startswith(".")} == set(everything["volumes"])
    assert {mounted["source"] for one in services.values() for mounted in one.get("configs", ())} == set(
        everything["configs"]
    )
    for one in services.values():
        assert set(one.get("depends_on", ())) <= set(services)
    settings = settings_in(tmp_path)
    email = settings.alerts.email
    assert email is not None
    assert urlsplit(email.smtp).hostname == "mail"
    assert urlsplit(settings.destinations["objects"].model_dump()["endpoint_url"]).hostname == "objects"
    assert services["backupd"]["hostname"] == "backupd", "Prometheus asks for it by this name, and it knows its own"
    (targets,) = yaml.safe_load(files_of("prometheus")["/etc/prometheus/prometheus.yml"])["scrape_configs"]
    assert targets["static_configs"] == [{"targets": [f"backupd:{settings.api.listen.rpartition(':')[2]}"]}]


def test_secrets_come_from_outside_and_nothing_is_open_to_other_hosts() -> None:
    text = FILE.read_text()
    for name in SECRETS:
        assert f"${{{name}:?" in text, "without it nothing starts"
    assert {found[1] for found in VARIABLE.finditer(text)} == set(SECRETS)
    published = [port for one in document()["services"].values() for port in one.get("ports", ())]
    assert len(published) == 3
    assert all(port.startswith("127.0.0.1:") for port in published)
    for mounted in document()["services"]["backupd"]["configs"]:
        if "$" in document()["configs"][mounted["source"]]["content"]:
            assert mounted["mode"] in (400, 0o400), "written 0400, which YAML 1.2 and 1.1 read differently"


def test_the_image_asks_itself_at_the_port_that_it_listens_on(tmp_path: Path) -> None:
    image = (ROOT / "Dockerfile").read_text()
    match = re.search(r"^HEALTHCHECK .* CMD (\[.*?\])$", image.replace("\\\n", ""), re.MULTILINE)
    assert match is not None
    program, flag, code = json.loads(match[1])
    assert (program, flag) == ("python3", "-c")
    compile(code, "healthcheck", "exec")
    port = settings_in(tmp_path).api.listen.rpartition(":")[2]
    assert f"127.0.0.1:{port}/readyz" in code
    assert f"EXPOSE {port}" in image
    assert document()["services"]["backupd"]["ports"] == [f"127.0.0.1:{port}:{port}"]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool on this machine")
def test_prometheus_takes_what_it_is_given(tmp_path: Path) -> None:
    for path, text in files_of("prometheus").items():
        (tmp_path / Path(path).name).write_text(text)
    done = subprocess.run(
        ["promtool", "check", "config", tmp_path / "prometheus.yml"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def _has_compose() -> bool:
    docker = shutil.which("docker")
    return (
        docker is not None
        and subprocess.run([docker, "compose", "version"], capture_output=True, check=False).returncode == 0
    )


@pytest.mark.skipif(not _has_compose(), reason="no docker compose on this machine")
def test_docker_compose_takes_it() -> None:
    done = subprocess.run(
        ["docker", "compose", "-f", FILE, "config", "--quiet"],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": "/usr/bin:/bin:/usr/local/bin", **SECRETS},
    )
    assert (done.returncode, done.stderr) == (0, "")
