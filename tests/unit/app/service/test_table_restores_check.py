"""`backupd check`: may tables be restored into the server, and with which statement does that become so?"""

from __future__ import annotations

from pathlib import Path

from backupd.app.context.settings import load_settings
from backupd.app.service.check import _restores_into
from backupd.backup.finding import Finding
from tests.support.e2e.house import SERVER, House
from tests.support.keys import Keys
from tests.support.servers.mariadb import PrivateServer


def told(house: House) -> Finding:
    (found,) = _restores_into(load_settings(house.config).server(SERVER))
    return found


def test_what_the_account_for_table_restores_may_do_is_told(
    short_tmp: Path, shared_server: PrivateServer, keys: Keys
) -> None:
    house = House(short_tmp, shared_server, keys)
    config = house.config.read_text()
    shared_server.create_user("reader", "Pa55-word", ("SELECT",))
    option_file = short_tmp / "reader.cnf"
    option_file.write_text(f"[client]\nuser=reader\npassword=Pa55-word\nsocket={shared_server.socket}\n")
    try:
        house.config.write_text(config.replace("policy: gold", f"restore_defaults_file: {option_file}, policy: gold"))
        lacking = told(house)
        assert (str(lacking.severity), "may not restore tables" in lacking.message) == ("warning", True)
        shared_server.execute(lacking.hint)
        assert told(house).message == f"reader@localhost may restore tables into {SERVER}, by its grants"
    finally:
        shared_server.execute("DROP USER reader@localhost")
    house.config.write_text(
        config.replace("policy: gold", f"restore_defaults_file: {shared_server.client_file()}, policy: gold")
    )
    assert str(told(house).severity) == "ok"
