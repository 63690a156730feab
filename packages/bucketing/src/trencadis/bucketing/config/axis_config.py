"""The user's settings for one axis of a bucket grid."""

from __future__ import annotations

from typing import Any

import attrs

from trencadis.bucketing.errors import BucketingError
from trencadis.bucketing.shapes import MAX_SIZE
from trencadis.bucketing.validators import Validator, instance_of, integer


def setting(default: Any, validator: Validator, help: str, **env: str) -> Any:
    """A field with its meaning, and its variables (``env``, ``env_alias``), as metadata."""
    return attrs.field(default=default, validator=validator, metadata={"help": help, **env})


@attrs.frozen
class AxisConfig:
    """The settings of one axis of one phase. None leaves a setting to its default.

    The metadata of each field has its meaning (`help`) and the end of its environment variable
    (`env`); the start is in the metadata of `BucketingConfig`.

    Raises:
        BucketingError: a setting out of bounds, or `min` above `max`.
    """

    min: int | None = setting(
        None,
        integer(0, MAX_SIZE, optional=True),
        "smallest bucket, in units of the axis",
        env="MIN",
    )
    step: int | None = setting(
        None,
        integer(1, MAX_SIZE, optional=True),
        "granularity of the buckets, in units of the axis",
        env="STEP",
    )
    max: int | None = setting(
        None, integer(0, MAX_SIZE, optional=True), "largest bucket, in units of the axis", env="MAX"
    )
    limit: int | None = setting(
        None,
        integer(1, MAX_SIZE, optional=True),
        "largest number of buckets on the axis",
        env="LIMIT",
    )
    pad_max: int | None = setting(
        None,
        integer(0, MAX_SIZE, optional=True),
        "largest padding, in units of the axis",
        env="PAD_MAX",
    )
    pad_percent: int | None = setting(
        None,
        integer(0, 50, optional=True),
        "largest padding, in percent of a bucket, 0 to 50",
        env="PAD_PERCENT",
    )

    def __attrs_post_init__(self) -> None:
        if self.min is not None and self.max is not None and self.min > self.max:
            raise BucketingError(
                f"bucket min {self.min} is above max {self.max}: lower min or raise max"
            )


def axis_settings(help: str, **env: str) -> Any:
    """A field with the settings of an axis, and what `setting` has as metadata."""
    return setting(AxisConfig(), instance_of(AxisConfig), help, **env)
