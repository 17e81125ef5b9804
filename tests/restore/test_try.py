from tests.restore.taken import *
from restore.executor import execute as run
from tests.support.mariadb import PrivateServer
from tests.support import sample
def test_it(taken, keys, short_tmp, shared_server):
    datadir = short_tmp/"mysql"
    out = run(taken.spec(datadir, start=True), destinations=[taken.destination], unsealer=Unsealer(keys.secret_home), clock=now, report=silent)
    print(out.as_json())
    import os,signal; os.kill(out.started.pid, 9)
    assert out.is_good
