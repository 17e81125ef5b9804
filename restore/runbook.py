from backupd.model.manifest import Body, Header
def render_runbook(header: Header, body: Body, *, destinations: list[str]) -> str:
    return ""
