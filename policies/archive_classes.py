"""Archive classes of S3: what thaws cost and take, in the configuration."""

from __future__ import annotations

from datetime import date
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from backupd.model.document import made_of
from policies.fields import Section, Words, section, written
from storage.config import StorageClass

if TYPE_CHECKING:
    from backupd.model.thaw import Prices

TierName = Literal["bulk", "standard", "expedited"]
Amount = Annotated[float, Field(ge=0, le=1e9)]


class TierPrice(Section):
    """What one tier of one storage class takes."""

    hours: Annotated[float, Field(gt=0, le=1000)] = Field(
        description="Maximum time until the objects can be read.", examples=[12]
    )
    per_gib: Amount = Field(0, description="For each GiB.", examples=[0.02])
    per_1000_requests: Amount = Field(0, description="For each thousand objects.", examples=[0.1])


class ClassPrice(Section):
    """What one storage class costs."""

    minimum_days: int = Field(
        0,
        ge=0,
        le=3650,
        examples=[180],
        description=(
            "Minimum storage duration in days. The provider charges for it even if the object is deleted earlier."
        ),
    )
    per_gib_month: Amount = Field(0, description="Storing a GiB for a month.", examples=[0.00099])
    tiers: dict[TierName, TierPrice] = Field(
        default_factory=dict,
        description="The tiers of a class that has to be thawed; none where it can be read as it is.",
        examples=[{"standard": {"hours": 12, "per_gib": 0.02}}],
    )


_LIST: dict[StorageClass, dict[str, Any]] = {
    "STANDARD_IA": {"minimum_days": 30, "per_gib_month": 0.0125},
    "ONEZONE_IA": {"minimum_days": 30, "per_gib_month": 0.01},
    "GLACIER_IR": {"minimum_days": 90, "per_gib_month": 0.004},
    "INTELLIGENT_TIERING": {"tiers": {"bulk": {"hours": 48}, "standard": {"hours": 12}}},
    "GLACIER": {
        "minimum_days": 90,
        "per_gib_month": 0.0036,
        "tiers": {
            "bulk": {"hours": 12},
            "standard": {"hours": 5, "per_gib": 0.01, "per_1000_requests": 0.05},
            "expedited": {"hours": 0.1, "per_gib": 0.03, "per_1000_requests": 10},
        },
    },
    "DEEP_ARCHIVE": {
        "minimum_days": 180,
        "per_gib_month": 0.00099,
        "tiers": {
            "bulk": {"hours": 48, "per_gib": 0.0025, "per_1000_requests": 0.025},
            "standard": {"hours": 12, "per_gib": 0.02, "per_1000_requests": 0.1},
        },
    },
}
"""Amazon's list prices of us-east-1 as they were known at ``dated``."""


class PriceTable(Section):
    """What estimates are made with. By default Amazon's list prices of us-east-1 at the date that is given; what your
    provider, region and contract say is better. Transfer to this host is not in it.
    """

    currency: Words = Field("USD", description="Currency of the prices.", examples=["EUR"])
    dated: date = Field(date(2025, 1, 1), description="Date of the prices. Plans display it.", examples=["2026-01-31"])
    copy_per_gib_month: Amount = Field(0.023, description="Price of a thawed copy per GiB and month.", examples=[0.023])
    classes: dict[StorageClass, ClassPrice] = Field(
        default_factory=dict,
        examples=[{"DEEP_ARCHIVE": {"minimum_days": 180}}],
        description="Prices by storage class. An entry replaces the built-in prices of its class completely.",
    )

    @cached_property
    def as_prices(self) -> Prices:
        from backupd.model.thaw import Price, Prices  # few need them

        classes = {**{name: ClassPrice.model_validate(one) for name, one in _LIST.items()}, **self.classes}
        return Prices(
            self.currency,
            self.dated,
            {name: {tier: made_of(Price, price) for tier, price in one.tiers.items()} for name, one in classes.items()},
            {name: one.minimum_days for name, one in classes.items()},
            {name: one.per_gib_month for name, one in classes.items()},
            self.copy_per_gib_month,
        )


class Archive(Section):
    """Objects in archive classes, which have to be thawed before they can be read."""

    tier: TierName = Field(
        "standard", description="Default thaw tier, used when a command does not set --tier.", examples=["bulk"]
    )
    days: int = Field(7, ge=1, le=365, description="For how many days what was thawed stays readable.", examples=[7])
    requests_per_second: int = written(50, ge=1, le=1000, description="Maximum number of thaw requests per second.")
    prices: PriceTable = section("Prices of thaws and minimum storage durations.")
