"""The files that a `BucketingConfig` names: the bucket file and recorded traffic."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from trencadis.bucketing.bucket_file import ListedBuckets, read_bucket_file
from trencadis.bucketing.config.bucketing_config import BucketingConfig, Phase
from trencadis.bucketing.config.environment import variable_of
from trencadis.bucketing.errors import BucketingError
from trencadis.bucketing.strategies import STRATEGIES
from trencadis.bucketing.traffic import TrafficRecorder


def listed_buckets(config: BucketingConfig) -> ListedBuckets:
    """The buckets of the bucket file. A phase without any uses its strategy, as without a file.

    Raises:
        BucketingError: a file that cannot be read or has a bad line.
    """
    if not config.bucket_file:
        return ListedBuckets((), ())
    with _errors_name_setting("bucket_file"):
        return read_bucket_file(config.bucket_file)


def recorded_traffic(config: BucketingConfig, phase: Phase) -> TrafficRecorder:
    """The recorded traffic of one phase.

    Raises:
        BucketingError: no file set, or one that cannot be read.
    """
    field = f"{phase}_traffic"
    path: str | None = getattr(config, field)
    if path is None:
        rules = [name for name, strategy in STRATEGIES.items() if strategy.fit is None]
        raise BucketingError(
            f"strategy {config.strategy_of(phase)} has no traffic to fit to: set "
            f"{variable_of(BucketingConfig, field)} to a file that TrafficRecorder.save wrote, "
            f"or choose from {', '.join(rules)}"
        )
    with _errors_name_setting(field):
        return TrafficRecorder.load(path)


@contextmanager
def _errors_name_setting(field: str) -> Generator[None, None, None]:
    """Turn an error of the file system into one that names the setting."""
    try:
        yield
    except OSError as error:
        variable = variable_of(BucketingConfig, field)
        raise BucketingError(f"{variable}={error.filename}: {error.strerror}: change it") from error
