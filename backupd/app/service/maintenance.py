"""Looking after what the rest stands on: the catalog, its copies, signatures, and what lies at the destinations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING

from backupd.app.context.audit import deed
from backupd.app.context.wiring import Wiring
from backupd.model.access import Actor
from backupd.model.job import Report
from backupd.model.text import format_time

if TYPE_CHECKING:
    from collections.abc import Sequence

    from backupd.app.metacopies.catalog_copies import Copied
    from backupd.app.metacopies.signing_keys import Made, Rotation
    from backupd.app.metacopies.vouching import Vouched
    from backupd.app.reconcile.backup_records import Adopted
    from backupd.app.restores.catalog_rebuild import Rebuilt
    from backupd.app.restores.recover_versions import BroughtBack
    from backupd.app.verify.verification import FsckOutcome


class Upkeep:
    """By one actor. Every method raises errors of backupd.model.errors."""

    def __init__(self, wiring: Wiring, actor: Actor) -> None:
        self._wiring, self._actor = wiring, actor

    def rebuild(
        self,
        destination: str,
        report: Report,
        *,
        merge: bool = False,
        adopt: bool = False,
        failed_at: datetime | None = None,
        counters: Mapping[str, int] | None = None,
    ) -> Rebuilt:
        """The catalog from what lies at one destination; ``merge``: into one that is not empty; ``adopt``: what that
        did not know counts as ours, too; ``failed_at``, ``counters``: what shows whether the place was turned back
        (see ``heads.compare``)."""
        from backupd.app.metacopies.signed_heads import compare, lists_compared
        from backupd.app.restores.catalog_rebuild import rebuild

        with deed(self._wiring, self._actor, "catalog-rebuilt", subject=destination, detail="merged" if merge else ""):
            seen = compare(self._wiring, failed_at=failed_at, counters=counters)
            done = rebuild(self._wiring, destination, report, merge=merge, adopt=adopt)
            return replace(
                done,
                heads=seen.lines,
                problems=(*done.problems, *seen.suspicions),
                elsewhere=lists_compared(self._wiring),
            )

    def adopt(self, names: Sequence[str]) -> tuple[Adopted, ...]:
        """Foreign backups, or all those of servers: they count as ours from now on."""
        from backupd.app.reconcile.backup_records import adopt

        with deed(self._wiring, self._actor, "backups-adopted", subject=", ".join(names)):
            return adopt(self._wiring, names)

    def copy(self) -> tuple[Copied, ...]:
        """Catalog, configuration, proofs and RECOVER.md to every destination, now."""
        from backupd.app.metacopies.catalog_copies import write_copies

        return write_copies(self._wiring, now=True)

    def sign(self, destination: str, *, unproven: bool = False) -> Vouched:
        """Sign what lies there unsigned and is what the runs of this catalog stored; ``unproven``: also what merely
        agrees with the catalog."""
        from backupd.app.metacopies.vouching import vouch

        with deed(
            self._wiring, self._actor, "documents-signed", subject=destination, detail="unproven" if unproven else ""
        ):
            return vouch(self._wiring, destination, unproven=unproven)

    def make_signing(self) -> Made:
        """A first key that signs; the configuration has to name it."""
        from backupd.app.metacopies.signing_keys import make_signing

        with deed(self._wiring, self._actor, "signing-key-made") as told:
            done = make_signing(self._wiring)
            told.subject = done.key
            return done

    def rotate_signing(self, *, to: str | None = None, former: str | None = None, unproven: bool = False) -> Rotation:
        """Another key that signs, in two steps; see ``signingkeys.rotate_signing``."""
        from backupd.app.metacopies.signing_keys import rotate_signing

        with deed(self._wiring, self._actor, "signing-key-rotated", detail="unproven" if unproven else "") as told:
            done = rotate_signing(self._wiring, to=to, former=former, unproven=unproven)
            told.subject = done.key
            told.detail = f"{'in the place of' if done.finished else 'beside'} {done.former}"
            return done

    def look_back(self, destination: str, since: datetime) -> BroughtBack:
        """What was hidden or overwritten there since then and can be brought back."""
        from backupd.app.restores.recover_versions import look

        return look(self._wiring, destination, since)

    def bring_back(self, destination: str, since: datetime, report: Report) -> BroughtBack:
        from backupd.app.restores.recover_versions import act

        with deed(self._wiring, self._actor, "brought-back", subject=destination, detail=f"since {format_time(since)}"):
            return act(self._wiring, destination, since, report)

    def fsck(self, *, repair: bool) -> FsckOutcome:
        from backupd.app.verify import verification

        if not repair:
            return verification.fsck(self._wiring, mend=False)
        with deed(self._wiring, self._actor, "repaired"):
            return verification.fsck(self._wiring, mend=True)
