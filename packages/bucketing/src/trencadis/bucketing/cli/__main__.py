"""`python -m trencadis.bucketing.cli`: the same as `trencadis-buckets`."""

from __future__ import annotations

from trencadis.bucketing.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
