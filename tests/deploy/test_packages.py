"""What `scripts/package` builds: the wheel in an empty environment; the .deb on a root of its own, where a real
systemd, the first process of its own namespaces, starts, reloads and stops the shipped unit; and what a purge leaves.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from backupd.engine.server.sandbox import MAKE_WORKER
from tests.support.booted import Booted, booted, why_not
from tests.support.dice import SOAK
from tests.support.keys import Keys
from tests.support.service.systemd_unit import service, writable

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the .deb is for Python 3.11")

_CONFIGURATION = """\
catalog: sqlite:////var/lib/backupd/catalog.db
spool: /var/lib/backupd/spool
policies: /etc/backupd/policies
servers:
  shop: {socket: /run/none.sock, user: backupd, policy: first}
destinations:
  local: {type: filesystem, path: /srv/backups/repository}
encryption: {gnupg_home: /etc/backupd/gnupg, recipients: [ops@example.com]}
"""
_POLICY = 'physical: {full: "0 2 1 1 *"}\ndestinations: {required: [local]}\n'


def ran(*words: str | Path, **env: str) -> str:
    done = subprocess.run(
        words, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, env={**os.environ, **env}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def packaged(*words: str | Path) -> Path:
    """What `scripts/package` says that it has built."""
    return Path(ran(ROOT / "scripts" / "package", *words).splitlines()[-1])


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The .deb of this tree, not compressed."""
    return packaged("deb", "--quick", "--out", tmp_path_factory.mktemp("deb"))


def test_the_wheel_and_the_packages_of_the_lock_are_all_that_an_empty_environment_needs(tmp_path: Path) -> None:
    wheel = packaged("wheel", "--out", tmp_path)
    python = tmp_path / "env" / "bin" / "python"
    ran(sys.executable, "-m", "venv", "--without-pip", tmp_path / "env")
    ran(sys.executable, "-m", "pip", f"--python={python}", "install", "--quiet", "--no-index", "--no-deps", wheel)
    (tmp_path / "env" / "lib" / "python3.11" / "site-packages" / "lock.pth").write_text(f"{packaged('site')}\n")
    backupd = tmp_path / "env" / "bin" / "backupd"
    assert ran(backupd, "--version").startswith("backupd 0.")
    (tmp_path / "gold.yaml").write_text(ran(backupd, "policy", "example", "gold"))
    ran(backupd, "policy", "validate", tmp_path / "gold.yaml")
    # The service imports what commands do not.
    ran(
        python,
        "-P",
        "-c",
        "import backupd.app.service.daemon, api.server, backupd.app.service.worker, storage.s3.destination",
    )
    assert "/env/" in ran(python, "-P", "-c", "import backupd; print(backupd.__file__)")
    constraints = (tmp_path / "constraints.txt").read_text().splitlines()
    assert {re.split(r"[ ;]", one)[0] for one in constraints} == set(locked(with_backend=True))


def locked(*, with_backend: bool = False) -> list[str]:
    """``name==version`` of every line of the lock."""
    found = re.findall(
        r"^([A-Za-z0-9._-]+)(?:\[[^\]]*\])?(==[^ ;\\]+)", (ROOT / "requirements.lock").read_text(), re.MULTILINE
    )
    return [name + version for name, version in found if with_backend or name != "setuptools"]


def test_the_deb_holds_what_the_lock_names_and_no_more(package: Path, tmp_path: Path) -> None:
    ran("dpkg-deb", "--extract", package, tmp_path)
    site = tmp_path / "usr/lib/backupd/lib/python3.11/site-packages"
    there = {
        f"{canonicalize_name(name)}=={version}"
        for name, version in (path.name.removesuffix(".dist-info").rsplit("-", 1) for path in site.glob("*.dist-info"))
    }
    strange = there - {canonical(one) for one in locked()}
    assert {one.partition("==")[0] for one in strange} == {"backupd"}
    assert "pytest" not in {path.name for path in site.iterdir()}
    sources = {path.relative_to(site).as_posix() for path in site.rglob("*.py")}
    compiled = {
        f"{path.parent.parent.relative_to(site).as_posix()}/{path.name.split('.cpython')[0]}.py".removeprefix("./")
        for path in site.rglob("*.pyc")
    }
    assert {one for one in sources - compiled if not one.startswith(("botocore/", "lib2to3/"))} == set()
    unit = tmp_path / "lib/systemd/system/backupd.service"
    assert unit.read_bytes() == (ROOT / "deploy" / "backupd.service").read_bytes()
    (program,) = re.findall(r"^ExecStart=(\S+) serve$", unit.read_text(), re.MULTILINE)
    assert (tmp_path / program.lstrip("/")).resolve() == tmp_path / "usr/lib/backupd/bin/backupd"
    for page in ("man1/backupd.1.gz", "man5/backupd.yaml.5.gz"):
        assert (tmp_path / "usr/share/man" / page).stat().st_size > 1000
    for shell in ("bash-completion/completions/backupd", "zsh/vendor-completions/_backupd"):
        assert (tmp_path / "usr/share" / shell).is_file()


def canonical(pin: str) -> str:
    name, _, version = pin.partition("==")
    return f"{canonicalize_name(name)}=={version}"


def test_the_deb_makes_the_user_and_the_folders_that_the_guide_names() -> None:
    script = (ROOT / "deploy" / "debian" / "postinst").read_text()
    assert MAKE_WORKER in script
    folders = {path: mode for mode, path in re.findall(r"^ +folder (\d+) (\S+)$", script, re.MULTILINE)}
    assert set(writable()) - {"/run/backupd"} <= set(folders)
    assert folders["/etc/backupd"] == "0700"
    assert folders["/var/lib/backupd"] == service()["StateDirectoryMode"]


@pytest.fixture(scope="module")
def system(package: Path, keys: Keys) -> Iterator[Booted]:
    if why := why_not():
        pytest.skip(why)
    with booted() as system:
        # The files of this machine are seen from in there, but for what is mounted over them.
        system.ok("mkdir", "-p", "/root/given")
        root = Path(f"/proc/{system.pid}/root")
        shutil.copy(package, root / "root" / "given" / "backupd.deb")
        system.ok("dpkg", "--install", "/root/given/backupd.deb")
        etc = root / "etc" / "backupd"
        shutil.copytree(keys.public_home, etc / "gnupg", ignore=shutil.ignore_patterns("S.*", "*.lock", ".#*"))
        (etc / "backupd.yaml").write_text(_CONFIGURATION)
        (etc / "policies" / "first.yaml").write_text(_POLICY)
        yield system


def until(true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 300
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def log(system: Booted) -> str:
    return system.ok("journalctl", "--no-pager", "--unit=backupd", "--output=cat")


def test_the_unit_starts_reloads_comes_back_and_stops(system: Booted) -> None:
    system.ok("systemctl", "enable", "--now", "backupd")  # returns when the service says that it is ready
    assert system.property("backupd", "ActiveState") == "active"
    first = system.property("backupd", "MainPID")
    policy = Path(f"/proc/{system.pid}/root/etc/backupd/policies/first.yaml")
    policy.write_text(_POLICY.replace("0 2", "0 3"))
    system.ok("systemctl", "reload", "backupd")
    until(lambda: "reload" in log(system), "nothing was read anew")
    assert system.property("backupd", "MainPID") == first
    system.ok("systemctl", "set-property", "--runtime", "backupd", "CPUWeight=100")
    system.ok("kill", "-9", first)
    until(lambda: system.property("backupd", "NRestarts") == "1", "it was not started again")
    until(lambda: system.property("backupd", "ActiveState") == "active", "it does not come back")
    assert system.property("backupd", "MainPID") not in (first, "0")
    _confined(system)
    system.ok("systemctl", "stop", "backupd")
    assert system.property("backupd", "Result") == "success"


def _confined(system: Booted) -> None:
    """What the unit takes from the service is gone from the process that runs."""
    pid = system.property("backupd", "MainPID")
    status = dict(
        line.split(":\t", 1) for line in system.ok("cat", f"/proc/{pid}/status").splitlines() if ":\t" in line
    )
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    assert int(status["CapBnd"], 16) & 1 << 21 == 0  # CAP_SYS_ADMIN
    inside = ("nsenter", f"--target={pid}", "--mount", "--root", "--wd=/", "--")
    assert system.run(*inside, "touch", "/var/lib/backupd/x").returncode == 0
    assert system.run(*inside, "touch", "/srv/backups/x").returncode == 0
    for path in ("/etc/x", "/var/lib/x", "/usr/x", "/root/x"):
        assert system.run(*inside, "touch", path).returncode != 0, path
    assert system.run(*inside, "test", "-e", "/dev/vda").returncode != 0


def test_a_mistake_in_the_configuration_is_not_tried_again(system: Booted) -> None:
    configuration = Path(f"/proc/{system.pid}/root/etc/backupd/backupd.yaml")
    configuration.write_text("nonsense: 1\n")
    try:
        assert system.run("systemctl", "start", "backupd").returncode != 0
        assert system.property("backupd", "ExecMainStatus") == "2"
        assert system.property("backupd", "ActiveState") == "failed"
    finally:
        configuration.write_text(_CONFIGURATION)


def test_what_is_removed_leaves_backups_and_keys(system: Booted) -> None:
    assert "backupd 0." in system.ok("backupd", "--version")
    there = Path(f"/proc/{system.pid}/root")
    (there / "srv/backups/kept").write_text("a backup")
    system.ok("systemctl", "start", "backupd")
    system.ok("dpkg", "--purge", "backupd")
    assert system.run("systemctl", "is-active", "backupd").stdout.strip() != "active"
    for gone in ("usr/bin/backupd", "usr/lib/backupd", "lib/systemd/system/backupd.service"):
        assert system.run("test", "-e", f"/{gone}").returncode != 0, gone
    for kept in ("srv/backups/kept", "etc/backupd/gnupg", "etc/backupd/backupd.yaml", "var/lib/backupd/catalog.db"):
        assert system.run("test", "-e", f"/{kept}").returncode == 0, kept


_FRESH = (
    *("systemd", "systemd-sysv", "dbus", "mariadb-server", "mariadb-backup", "mydumper", "python3", "gnupg", "zstd"),
    *("bubblewrap", "ca-certificates", "passwd", "util-linux"),
)
TYPED = r"""
apt-get install --yes /root/given/backupd.deb
printf '[mysqld]\nlog_bin=binlog\nserver_id=1\nbinlog_format=ROW\nsync_binlog=1\n' >/etc/mysql/mariadb.conf.d/90.cnf
systemctl restart mariadb
backupd setup --yes --server shop --mail-to dba@example.com
systemctl enable --now backupd
""".strip().splitlines()
"""What somebody types on a Debian 12 with a MariaDB on it, from the package to a service that runs."""
_ASK = """
import sys, urllib.request
request = urllib.request.Request("http://127.0.0.1:8642/v1/" + sys.argv[2], sys.argv[3].encode())
request.add_header("Authorization", "Bearer " + sys.argv[1])
request.add_header("Content-Type", "application/json")
print(urllib.request.urlopen(request).read().decode())
"""
_LIVES = "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8642/healthz')"


@SOAK
def test_a_fresh_debian_with_a_mariadb_comes_to_a_proved_backup_by_five_typed_lines(
    package: Path, tmp_path: Path
) -> None:
    """$BACKUPD_TEST_DEBIAN: such a root that was made before."""
    if why := why_not():
        pytest.skip(why)
    root = Path(os.environ.get("BACKUPD_TEST_DEBIAN", tmp_path / "debian"))
    if not root.exists():
        ran("mmdebstrap", "--variant=minbase", "--skip=output/dev", f"--include={','.join(_FRESH)}", "bookworm", root)
    with booted(root) as system:
        given = Path(f"/proc/{system.pid}/root/root/given")
        given.mkdir()
        shutil.copy(package, given / "backupd.deb")
        system.ok("systemctl", "start", "mariadb")
        system.ok("mariadb", "--execute", "CREATE DATABASE shop; CREATE TABLE shop.t (id INT PRIMARY KEY)")
        system.ok("mariadb", "--execute", "INSERT INTO shop.t SELECT seq FROM mysql.seq_1_to_1000")
        began = time.monotonic()
        said = "".join(system.ok("sh", "-c", line, timeout=600) for line in TYPED)
        assert time.monotonic() - began < 300
        assert "proof  " in said
        assert system.property("backupd", "ActiveState") == "active"
        until(lambda: _warned(system) <= {"restore keys"}, "check is not clean")
        _by_the_service(system)


def _warned(system: Booted) -> set[str]:
    found = json.loads(system.run("backupd", "check", "--json").stdout)
    return {one["subject"] for one in found if one["severity"] != "ok"}


def _by_the_service(system: Booted) -> None:
    """A backup and a proof, as jobs of the unit with all that it takes from them."""
    token = json.loads(system.ok("backupd", "token", "create", "--role", "admin", "--name", "test", "--json"))["token"]
    for path, body in (("backups", {"server": "shop", "kind": "full"}), ("test-restores", {"server": "shop"})):
        until(lambda: system.run("python3", "-c", _LIVES).returncode == 0, "the REST interface does not answer")
        job = json.loads(system.ok("python3", "-c", _ASK, token, path, json.dumps(body)))["job"]["id"]

        def ended(job: str = job) -> bool:
            state = json.loads(system.ok("backupd", "jobs", "show", job, "--json"))["state"]
            assert state in ("queued", "running", "succeeded"), system.ok("backupd", "jobs", "show", job)
            return bool(state == "succeeded")

        until(ended, f"the job of {path} does not end")
