"""Through which member of a group a run goes: the members as they were found, in the order in which they are tried,
each with why it was taken or left. Pure.

A member that cannot be asked, is no server of its own, is away for another job, does not replicate, or is too far
behind is left. Of the others those that the group prefers come first; then those that a fresh comparison with the
source found equal, nodes whose cluster keeps most others in service, replicas that nobody can write to, and the least
lag.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum

from backupd.model.consistency import NOBODY, ComparedServer
from backupd.model.server_facts import Role
from backupd.model.text import format_duration

_STEP = 10.0
"""Seconds of lag that count as the same: between replicas that are both up to date the order of the configuration
decides, so that runs go to the same member."""


class Preference(StrEnum):
    """Of a group."""

    REPLICA = "replica"
    SOURCE = "source"
    ANY = "any"


class Compared(StrEnum):
    """What the last comparison with the source found; ``unknown``: none is recent enough, or there is none."""

    EQUAL = "equal"
    UNKNOWN = "unknown"
    DIFFERENT = "different"


@dataclass(frozen=True, slots=True)
class Identity:
    """What tells one server from another, whatever its address: equal in two members only where both names lead to one
    server."""

    uuid: str
    server_id: int
    hostname: str
    datadir: str

    def __str__(self) -> str:
        uuid = f", {self.uuid}" if self.uuid else ""
        return f"server_id {self.server_id}{uuid} on {self.hostname}, {self.datadir}"


@dataclass(frozen=True, slots=True)
class Node:
    """Of a Galera cluster. ``state``: as the node says it; ``others``: how many other nodes of the cluster are in
    service, as far as this one knows; ``desynced``: desynchronisations that are in force on it already."""

    state: str
    others: int = 0
    desynced: int = 0

    @property
    def room(self) -> int:
        """How many nodes stay in service when this one leaves it."""
        return self.others - self.desynced


@dataclass(frozen=True, slots=True)
class Candidate:
    """A member as it was found at the beginning of a run. ``trouble``: why it cannot be asked, and then nothing else is
    known. ``stopped``: which threads of a replica do not run, or why its lag is not known; ``lag``: in seconds, the
    configured ``delay`` not counted, behind what it has received; ``unheard``: why that may not be all, and ``silent``:
    for how many seconds; ``unordered``: why what it has applied is no single position; ``follows``: server_ids of the
    servers that it replicates. ``logs``: it writes a binary log; ``log_updates``: what it replicates, too. ``away``:
    what other job has taken it out of rotation; ``elsewhere``: why its files cannot be read from here. ``data``: by
    which it is known that it is the one that was compared; ``compared``: with the source, row by row."""

    name: str
    trouble: str = ""
    identity: Identity | None = None
    role: Role = Role.STANDALONE
    stopped: str = ""
    lag: float = 0.0
    unheard: str = ""
    silent: float = 0.0
    unordered: str = ""
    delay: float = 0.0
    follows: frozenset[int] = frozenset()
    read_only: bool = False
    logs: bool = False
    log_updates: bool = False
    node: Node | None = None
    away: str = ""
    elsewhere: str = ""
    data: ComparedServer = NOBODY
    compared: Compared = Compared.UNKNOWN

    @property
    def is_replica(self) -> bool:
        return self.role is Role.REPLICA

    @property
    def words(self) -> str:
        """What it is, in words."""
        if self.node is not None:
            return f"a node that is {self.node.state}"
        if not self.is_replica:
            return "the source" if self.role is Role.SOURCE else "no replica"
        delayed = f", delayed by {format_duration(self.delay)} on purpose" if self.delay else ""
        written = "" if self.read_only else ", which can be written to"
        lag = f"{format_duration(self.lag)} behind"
        if self.unheard:
            lag = f"whose lag is not known ({lag} what it has received, and {self.unheard})"
        return f"a replica, {lag}{delayed}{written}"


@dataclass(frozen=True, slots=True)
class Rules:
    """What a run asks of its member. ``here``: its files must be readable on this host; ``needs_log``: it must write
    all of the group's history into its binary log; ``stay``: the identity of the server that a chain or a stream is of,
    which goes first whatever is preferred; None where there is none."""

    prefer: Preference = Preference.REPLICA
    max_lag: timedelta = timedelta(seconds=60)
    here: bool = False
    needs_log: bool = False
    stay: str = ""


@dataclass(frozen=True, slots=True)
class Choice:
    """``left``: it is not tried; ``reason``: why, or why it is tried at its place."""

    name: str
    reason: str
    left: bool = False
    found: Candidate | None = field(default=None, compare=False)


def choose(candidates: Sequence[Candidate], rules: Rules) -> tuple[Choice, ...]:
    """Every member once: first those that are tried, in order, then those that are left."""
    unclear = {**apart(candidates), **_duplicates(candidates)}
    usable, left = list[Candidate](), list[Choice]()
    for one in candidates:
        if why := unclear.get(one.name) or next(_objections(one, rules), ""):
            left.append(Choice(one.name, why, left=True, found=one))
        else:
            usable.append(one)
    usable.sort(key=_order(rules))
    return (*(Choice(one.name, _reason(one, rules), found=one) for one in usable), *left)


def taken_because(choices: Sequence[Choice], name: str, failed: Sequence[tuple[str, str]] = ()) -> str:
    """Why a run went through the member ``name``, in one line: what it was, and why others, which the group prefers or
    which came before it, were not taken. ``failed``: those that were tried, with what happened."""
    (taken,) = (one for one in choices if one.name == name)
    passed = [*failed, *((one.name, one.reason) for one in choices if one.left)]
    return "; ".join([taken.reason, *(f"{other}: {why}" for other, why in passed)])


def _duplicates(candidates: Sequence[Candidate]) -> dict[str, str]:
    """Members that lead to one server, which an address of its own never does."""
    counted = Counter(one.identity for one in candidates if one.identity is not None)
    found = {}
    for one in candidates:
        if one.identity is not None and counted[one.identity] > 1:
            others = [other.name for other in candidates if other.identity == one.identity and other.name != one.name]
            found[one.name] = (
                f"it is the same server as {', '.join(others)} ({one.identity}): a proxy or a virtual address answers"
            )
        elif one.identity is not None and (copies := _of_same_uuid(one, candidates)):
            found[one.name] = (
                f"it has the same uuid as {', '.join(copies)} ({one.identity.uuid}), which is another server: the data "
                "directory of one of them is a copy of the other's; remove auto.cnf from that, and restart it"
            )
    return found


def _of_same_uuid(one: Candidate, candidates: Sequence[Candidate]) -> list[str]:
    """Other servers that cannot be told from this one: a chain or a stream of one would go on with another."""
    uuid = one.identity.uuid if one.identity is not None else ""
    return [other.name for other in candidates if uuid and other is not one and _is(other, uuid)]


def apart(candidates: Sequence[Candidate]) -> dict[str, str]:
    """Members that follow nobody, beside others of which that is true, too: only one of these is the source, and the
    others hold what it was once. It is the one that the replicas follow, where these follow just one of them. Where
    they follow several, a replica of one of these is no better than that. With why, for each."""
    alone = [one for one in candidates if not (one.trouble or one.is_replica or one.node is not None)]
    if len(alone) < 2:
        return {}
    followed = {number for one in candidates for number in one.follows}
    sources = [one for one in alone if one.identity is not None and one.identity.server_id in followed]
    if len(sources) == 1:
        return {
            one.name: f"it is no replica, and the replicas of the group follow {sources[0].name}"
            for one in alone
            if one is not sources[0]
        }
    names = ", ".join(one.name for one in alone)
    unclear = {one.name: f"{names} are no replicas: nothing shows which of them is the source" for one in alone}
    rivals = {one.identity.server_id: one.name for one in sources if one.identity is not None}
    for one in candidates:
        if one.is_replica and (led := one.follows & rivals.keys()) and led != rivals.keys():
            followed_here = ", ".join(rivals[number] for number in sorted(led))
            unclear[one.name] = f"it follows {followed_here}, and nothing shows which of {names} is the source"
    return unclear


def _objections(one: Candidate, rules: Rules) -> Iterator[str]:
    """Everything that speaks against a member; the first one is reported."""
    if one.trouble:
        yield one.trouble
        return
    if one.identity is not None and not one.identity.uuid:
        yield "it reports no server_uuid or server_uid, by which a member is known again: upgrade it"
    if one.node is not None and one.node.state != "Synced":
        yield f"its node is {one.node.state}, not Synced"
    if one.away:
        yield one.away
    if one.is_replica and one.stopped:
        yield one.stopped
    if one.is_replica and one.lag > rules.max_lag.total_seconds():
        yield (
            f"it is {format_duration(one.lag)} behind its source, more than max_lag "
            f"({format_duration(rules.max_lag.total_seconds())})"
        )
    elif one.is_replica and one.lag + one.silent > rules.max_lag.total_seconds():
        yield (
            f"its lag is not known: {one.unheard}, and it would not notice for {format_duration(one.silent)} that its "
            f"source is gone; max_lag is {format_duration(rules.max_lag.total_seconds())}"
        )
    if one.is_replica and one.unordered:
        yield one.unordered
    if rules.here and one.elsewhere:
        yield one.elsewhere
    if rules.needs_log and not one.logs:
        yield "it writes no binary log (log_bin is OFF)"
    elif rules.needs_log and (one.is_replica or one.node is not None) and not one.log_updates:
        yield "its binary log lacks what it replicates (log_slave_updates is OFF)"


def _order(rules: Rules) -> Callable[[Candidate], tuple[object, ...]]:
    def key(one: Candidate) -> tuple[object, ...]:
        return (
            not _stays(one, rules),
            _rank(one, rules.prefer),
            bool(one.unheard),
            list(Compared).index(one.compared),
            -(one.node.room if one.node is not None else 0),
            one.is_replica and bool(one.delay),
            one.is_replica and not one.read_only,
            int(one.lag // _STEP),
        )  # of equals the order of the configuration decides

    return key


def _stays(one: Candidate, rules: Rules) -> bool:
    return bool(rules.stay) and one.identity is not None and one.identity.uuid == rules.stay


def _rank(one: Candidate, prefer: Preference) -> int:
    if prefer is Preference.ANY or one.node is not None:
        return 0
    return int(one.is_replica != (prefer is Preference.REPLICA))


def _reason(one: Candidate, rules: Rules) -> str:
    found = [one.words]
    if _stays(one, rules):
        found.append("what is there was taken from it")
    elif _rank(one, rules.prefer):
        found.append(f"though the group prefers {'replicas' if rules.prefer is Preference.REPLICA else 'its source'}")
    if one.compared is not Compared.UNKNOWN:
        words = {Compared.EQUAL: "its rows equal the source's", Compared.DIFFERENT: "its rows differ from the source's"}
        found.append(words[one.compared])
    if one.node is not None:
        found.append(f"{one.node.room} other nodes stay in service")
    return ", ".join(found)


@dataclass(frozen=True, slots=True)
class Following:
    """Where the binary log of a group is streamed from. ``name``: the member, "" for none now; ``switched``: it is
    another one than before."""

    name: str
    reason: str
    switched: bool = False


def follow(
    choices: Sequence[Choice],
    *,
    current: str,
    name: str,
    gone_since: datetime | None,
    patience: timedelta,
    now: datetime,
) -> Following:
    """``current``: the uuid of the server that was streamed last, "" for none; ``name``: of the member that it was, ""
    where that is not known; ``gone_since``: when it was last known to be there. Another one is streamed only when it
    has been gone for as long as ``patience`` says; until then it is waited for."""
    tried = [one for one in choices if not one.left]
    first = tried[0] if tried else None
    if not current:
        return Following(first.name, first.reason) if first is not None else Following("", _nobody(choices))
    same = min(
        (one for one in choices if one.found is not None and _is(one.found, current)),
        key=lambda one: one.name != name,  # copies have one uuid
        default=None,
    )
    if same is not None and not _is_gone(same):
        return Following(same.name, f"{same.reason}, and it is streamed already" if not same.left else same.reason)
    gone = now - gone_since if gone_since is not None else patience
    left = patience - gone
    if left > timedelta():
        return Following(
            name,
            f"the server that was streamed ({current}) does not answer since {format_duration(gone.total_seconds())}; "
            f"another member is streamed after {format_duration(patience.total_seconds())} (failover_after)",
        )
    if first is None:
        return Following("", _nobody(choices))
    return Following(
        first.name,
        f"{first.reason}; the server that was streamed ({current}) has been gone for "
        f"{format_duration(gone.total_seconds())}",
        switched=True,
    )


def _is(one: Candidate, uuid: str) -> bool:
    return one.identity is not None and one.identity.uuid == uuid


def _is_gone(one: Choice) -> bool:
    """A server that is behind, or away for a backup, still has its own log; one that leads elsewhere has not."""
    return one.found is None or bool(one.found.trouble) or not one.found.logs


def _nobody(choices: Sequence[Choice]) -> str:
    return "no member can be streamed: " + "; ".join(f"{one.name}: {one.reason}" for one in choices)
