from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from backupd.app.context.settings import load_settings
from backupd.app.service import check as confinement
from backupd.app.service.check import confinement_findings
from backupd.engine.server.sandbox import MAKE_WORKER, Way
from backupd.model.errors import RefusedError
from tests.support.catalog.configuration_files import CONFIGURATION, write

FORBIDDEN = "bwrap: Creating new namespace failed: Operation not permitted"
Check = Callable[..., dict[str, tuple[str, str, str]]]


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Check:
    """The findings by subject: severity, sentence, hint. ``user`` whom programs run as, ``found`` ways, why not the
    user's own; what stands in ``kernel``."""

    def checked(
        user: str | None, *found: Way, why: str = "", key_files: str = "", **kernel: str
    ) -> dict[str, tuple[str, str, str]]:
        monkeypatch.setattr(confinement, "worker", lambda: user)
        monkeypatch.setattr(confinement, "ways", lambda _user: found)
        monkeypatch.setattr(confinement, "obstacle", lambda _way, _user: why)
        for name, value in kernel.items():
            path = tmp_path / "sys" / name.replace("__", "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{value}\n")
        restore = f"restore: {{gnupg_home: /etc/backupd/gnupg-restore, key_files: [{key_files}]}}\n"
        settings = load_settings(write(tmp_path, CONFIGURATION + restore))
        return {
            one.subject: (str(one.severity), one.message, one.hint)
            for one in confinement_findings(settings, kernel=tmp_path / "sys")
        }

    return checked


def test_a_user_of_ours_in_a_namespace_of_his_own_is_well(check: Check) -> None:
    said = check("backupd-sandbox", Way.USER, Way.ROOT)
    assert {subject: one[0] for subject, one in said.items()} == {"sandbox": "ok", "confinement": "ok"}
    assert "run as backupd-sandbox, not as root" in said["sandbox"][1]
    assert "a user namespace confines" in said["confinement"][1]
    said = check(None, Way.USER)
    assert (said["sandbox"][0], "as backupd itself" in said["sandbox"][1]) == ("ok", True)


def test_the_databases_user_in_its_place_is_a_warning_with_the_command(check: Check) -> None:
    severity, message, hint = check("mysql", Way.USER)["sandbox"]
    assert (severity, hint) == ("warning", MAKE_WORKER)
    assert "run as mysql, and a running server of that user" in message


def test_without_anybody_to_run_as_it_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody() -> str:
        raise RefusedError("there is no user", hint=MAKE_WORKER)

    monkeypatch.setattr(confinement, "worker", nobody)
    (one,) = confinement_findings(load_settings(write(tmp_path)))
    assert (str(one.severity), one.subject, one.hint) == ("error", "sandbox", MAKE_WORKER)


def test_a_sandbox_made_by_root_is_well_and_says_what_keeps_the_user_from_it(check: Check) -> None:
    severity, message, _hint = check("backupd-sandbox", Way.ROOT, why=FORBIDDEN)["confinement"]
    assert (severity, FORBIDDEN in message, "confined by root" in message) == ("ok", True, True)


@pytest.mark.parametrize(
    ("kernel", "why", "hint"),
    [
        ({"user__max_user_namespaces": "0"}, FORBIDDEN, "sysctl -w user.max_user_namespaces=15000"),
        ({"kernel__unprivileged_userns_clone": "0"}, FORBIDDEN, "sysctl -w kernel.unprivileged_userns_clone=1"),
        ({"kernel__apparmor_restrict_unprivileged_userns": "1"}, FORBIDDEN, "an AppArmor profile"),
        ({"user__max_user_namespaces": "96365"}, FORBIDDEN, "allow user namespaces in this container or service"),
        ({"user__max_user_namespaces": "0"}, "the program bwrap is missing", "apt-get install bubblewrap"),
    ],
)
def test_where_nothing_confines_them_it_says_why_and_what_to_do(
    check: Check, kernel: dict[str, str], why: str, hint: str
) -> None:
    severity, message, told = check("backupd-sandbox", why=why, **kernel)["confinement"]
    assert severity == "warning"
    assert "run as backupd-sandbox and reach what that user reaches, the network included" in message
    assert why in message
    assert told.startswith(hint)
    assert "docs/installing.md" in told


def test_key_files_that_cannot_be_read_are_named(check: Check, tmp_path: Path) -> None:
    there = tmp_path / "keys"
    there.touch()
    assert check("backupd-sandbox", Way.USER, key_files=str(there))["key files"][0] == "ok"
    severity, message, _hint = check("backupd-sandbox", Way.USER, key_files=f"{there}-gone")["key files"]
    assert (severity, f"{there}-gone cannot be read: No such file" in message) == ("error", True)
