"""``backupd keys``: who opens the backups, and whether they still can."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from backupd.cli.session import Commands, Config, Json, Run, flag, option, remember, running
from backupd.model.errors import UsageError

app = Commands(
    shared=False, help="Keys: list them, challenge their holders, replace the signing key.", invoke_without_command=True
)


@app.callback()
def group(context: typer.Context, config: Config = None, as_json: Json = False) -> None:
    """List the keys: when each was last proved, when it expires, and how many backups depend on it."""
    remember(context, config, as_json)
    if context.invoked_subcommand is None:
        with running(context, config, as_json, "reads") as run:
            list_(run)


@app.command("list")
def list_(run: Run) -> None:
    """List the keys (also without the word `list`)."""
    states = run.service.keys.list()
    run.screen.document([state.as_json() for state in states])
    rows = []
    for state in states:
        info = state.info
        expires = f"{info.expires_at:%Y-%m-%d}" if info and info.expires_at else "never" if info else "-"
        proved = f"{state.proved_at:%Y-%m-%d} by {state.proved_by}" if state.proved_at else "never"
        due = (
            "-"
            if info is None
            else "OVERDUE"
            if state.overdue
            else (f"{state.due_at:%Y-%m-%d}" if state.due_at else "now")
        )
        alone = f"{state.backups.total} ({state.backups.alone} only by it)"
        rows.append((state.name if info else "(not configured)", state.fingerprint, expires, proved, due, alone))
    run.screen.table(("key", "fingerprint", "expires", "proved", "due", "backups"), rows)
    for state in states:
        if state.info is None and not state.here:
            run.screen.line(f"{state.fingerprint}: keep this secret key until its backups are gone", style="yellow")
        if state.info and (state.info.problem or state.info.warning):
            run.screen.line(f"{state.info.problem or state.info.warning}", style="yellow")
        if state.waiting:
            run.screen.line(f"{state.name}: challenge {state.waiting[0].id} waits for an answer")
        elif state.overdue:
            run.screen.line(f"{state.name}: no challenge is open: backupd keys challenge --recipient {state.name}")


@app.command(opening="works")
def challenge(
    run: Run,
    recipient: Annotated[str | None, option("--recipient", "NAME", "Only this key.")] = None,
    show: Annotated[bool, flag("--show", "Print the encrypted messages.")] = False,
) -> None:
    """Seal a random phrase for each key; its holder decrypts it with `gpg -d` and answers."""
    issued = run.service.keys.challenge(recipient)
    run.screen.done = "challenges were issued"
    run.screen.document([one.as_json() for one in issued])
    for one in issued:
        asked = one.challenge
        if asked is None:
            run.screen.line(f"{one.name}: no challenge could be sealed: {one.problem}", style="yellow")
        elif asked.answered_at:
            run.screen.line(f"{one.name}: proved, but only for the copy of the key on this machine")
        else:
            if one.problem:
                run.screen.line(f"{one.name}: {one.problem}", style="yellow")
            run.screen.line(f"{one.name}: where the key is:  gpg -d {one.file}")
            run.screen.line(f"  then here:  backupd keys answer {asked.id}")
            if show:
                run.screen.text(one.armored)
    run.ends(well=not any(one.challenge is None or one.problem for one in issued))


@app.command(opening="looks")
def page(run: Run) -> None:
    """Print the recovery page: the signing key and the command that verifies RECOVER.md. Keep it outside the backup
    storage."""
    found = run.service.keys.recovery_page()
    run.screen.document(found.as_json())
    run.screen.text(found.text)


@app.command("make-signing", opening="looks")
def make_signing(run: Run) -> None:
    """Create the signing key, and print what to add to the configuration.

    It cannot decrypt backups. It has no passphrase, because the service uses it unattended.
    """
    made = run.service.keys.make_signing()
    run.screen.done = f"the key {made.key} was created"
    run.screen.document(made.as_json())
    run.screen.line(f"the key {made.key} was created in {made.home}. Now:")
    for step in made.steps:
        run.screen.line(f"- {step}")


@app.command("rotate-signing")
def rotate_signing(
    run: Run,
    new_key: Annotated[
        str | None,
        option("--to", "FINGERPRINT", "Use this key of the keyring instead of creating one."),
    ] = None,
    former: Annotated[
        str | None,
        option("--from", "FINGERPRINT", "Retire this key. The configuration must name the new key already."),
    ] = None,
    unproven: Annotated[
        bool,
        flag(
            "--unproven",
            "Also sign backups that the catalog only imported from a destination. Use this only if you are "
            "certain that the old key was not stolen before that import.",
        ),
    ] = False,
) -> None:
    """Replace a lost or stolen signing key.

    Run it twice. First without --from: backupd creates a new key, or takes that of --to, and adds its signatures. Then
    set encryption.signing_key and run it with --from OLD_FINGERPRINT to retire the old key. Neither run needs the old
    key.
    """
    if new_key is not None and former is not None:
        raise UsageError(
            "--to and --from cannot be given together", hint="the first run takes --to, the second run --from"
        )
    done = run.service.keys.rotate_signing(to=new_key, former=former, unproven=unproven)
    run.screen.document(done.as_json())
    for name, destination in done.destinations.items():
        run.screen.line(f"{name}: {destination.signed} documents were signed with {done.key}")
        for text in destination.left:
            run.screen.line(f"not signed: {text}", style="yellow")
    for name, why in done.silent.items():
        run.screen.line(f"{name}: {why}; nothing more was signed there", style="yellow")
    for server, one in done.retired.items():
        run.screen.line(
            f"{server}: {one.key} counted up to the head with counter {one.counter}, {one.at:%Y-%m-%d %H:%M:%S} UTC"
        )
    run.screen.line("Now:" if done.ok else "Some documents are not signed. Now:", style="" if done.ok else "yellow")
    for step in done.steps:
        run.screen.line(f"- {step}")
    run.ends(well=done.ok)


@app.command()
def answer(run: Run, challenge_id: Annotated[str, typer.Argument(metavar="ID", help="Id of the challenge.")]) -> None:
    """Answer a challenge with its phrase, from stdin or at the prompt."""
    run.service.keys.get_challenge(challenge_id)  # before anybody looks for a phrase
    phrase = typer.prompt("phrase", err=True) if sys.stdin.isatty() else sys.stdin.read(4096)
    done = run.service.keys.answer(challenge_id, phrase)
    run.screen.done = "the answer was recorded"
    run.screen.document(done.as_json())
    run.screen.line(f"the key of {done.name} is proved")
