"""Looking after what the rest stands on: the catalog, its copies, signatures, and what lies at the destinations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING

from backupd.app.context.access import Facade
from backupd.model.job import Report
from backupd.model.text import format_time

if TYPE_CHECKING:
    from collections.abc import Sequence

    from backupd.app.context.keys import Issued, KeyState
    from backupd.app.context.trust import RecoveryPage
    from backupd.app.metacopies.catalog_copies import Copied
    from backupd.app.metacopies.signing_keys import Made, Rotation
    from backupd.app.metacopies.vouching import Vouched
    from backupd.app.reconcile.backup_records import Adopted
    from backupd.app.restores.catalog_rebuild import Rebuilt
    from backupd.app.restores.recover_versions import RecoveredVersions
    from backupd.app.verify.verification import FsckOutcome
    from backupd.model.access import Challenge


class Maintenance(Facade):
    """The catalog, its copies, and what is at the destinations."""

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

        with self._audited("catalog-rebuilt", subject=destination, detail="merged" if merge else ""):
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

        with self._audited("backups-adopted", subject=", ".join(names)):
            return adopt(self._wiring, names)

    def copy(self) -> tuple[Copied, ...]:
        """Catalog, configuration, proofs and RECOVER.md to every destination, now."""
        from backupd.app.metacopies.catalog_copies import write_copies

        return write_copies(self._wiring, now=True)

    def sign(self, destination: str, *, unproven: bool = False) -> Vouched:
        """Sign what lies there unsigned and is what the runs of this catalog stored; ``unproven``: also what merely
        agrees with the catalog."""
        from backupd.app.metacopies.vouching import vouch

        with self._audited("documents-signed", subject=destination, detail="unproven" if unproven else ""):
            return vouch(self._wiring, destination, unproven=unproven)

    def look_back(self, destination: str, since: datetime) -> RecoveredVersions:
        """What was hidden or overwritten there since then and can be brought back."""
        from backupd.app.restores.recover_versions import preview

        return preview(self._wiring, destination, since)

    def bring_back(self, destination: str, since: datetime, report: Report) -> RecoveredVersions:
        """Undo deletions and overwrites made there after ``since``, where the store keeps versions."""
        from backupd.app.restores.recover_versions import recover

        with self._audited("brought-back", subject=destination, detail=f"since {format_time(since)}"):
            return recover(self._wiring, destination, since, report)

    def fsck(self, *, repair: bool) -> FsckOutcome:
        """Compare catalog, manifests and objects; ``repair``: remove leftovers and correct what can be."""
        from backupd.app.verify import verification

        if not repair:
            return verification.fsck(self._wiring, mend=False)
        with self._audited("repaired"):
            return verification.fsck(self._wiring, mend=True)


class Keys(Facade):
    """The keys of the backups."""

    def list(self) -> Sequence[KeyState]:
        """Configured keys and those that backups are sealed for. Raises KeyUnusableError, ToolError."""
        from backupd.app.context.keys import keys

        return keys(self._wiring)

    def challenge(self, recipient: str | None) -> Sequence[Issued]:
        """Ask the holder of ``recipient``, or of every key, to prove it. Raises NotFoundError."""
        from backupd.app.context.keys import challenge

        return challenge(self._wiring, recipient)

    def get_challenge(self, challenge_id: str) -> Challenge:
        """Raises NotFoundError."""
        return self._wiring.catalog.challenges.get(challenge_id)

    def answer(self, challenge_id: str, phrase: str) -> Challenge:
        """Record the phrase that the holder decrypted. Raises NotFoundError, RefusedError for a wrong one."""
        from backupd.app.context.keys import answer

        with self._audited("key-answered", subject=challenge_id):
            return answer(self._wiring, challenge_id, phrase, self._actor.name)

    def recovery_page(self) -> RecoveryPage:
        """The page to keep on paper. Raises RefusedError where nothing is signed."""
        from backupd.app.context.trust import recovery_page
        from backupd.app.metacopies.signing_keys import replaced

        return recovery_page(self._wiring.settings, replaced(self._wiring))

    def make_signing(self) -> Made:
        """A first key that signs; the configuration has to name it."""
        from backupd.app.metacopies.signing_keys import make_signing

        with self._audited("signing-key-made") as told:
            done = make_signing(self._wiring)
            told.subject = done.key
            return done

    def rotate_signing(self, *, to: str | None = None, former: str | None = None, unproven: bool = False) -> Rotation:
        """Another key that signs, in two steps; see ``signingkeys.rotate_signing``."""
        from backupd.app.metacopies.signing_keys import rotate_signing

        with self._audited("signing-key-rotated", detail="unproven" if unproven else "") as told:
            done = rotate_signing(self._wiring, to=to, former=former, unproven=unproven)
            told.subject = done.key
            told.detail = f"{'in the place of' if done.finished else 'beside'} {done.former}"
            return done
