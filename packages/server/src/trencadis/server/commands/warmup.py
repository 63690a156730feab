"""``engine-serve warmup``: compiled programs for a server that is started later, or elsewhere."""

from __future__ import annotations

from trencadis.engine import (
    CompileCacheReport,
    EngineConfig,
    check_compile_cache,
    fill_compile_cache,
)


def warm_up_cache(config: EngineConfig, *, check: bool) -> int:
    """Fill ``config.compile_cache``, or check it, and print what it has.

    Returns the exit code: 1 if the program of any bucket is missing. Raises the errors of
    `fill_compile_cache` and `check_compile_cache`.
    """
    report = check_compile_cache(config) if check else fill_compile_cache(config)
    for phase, bucket in report.missing or ():
        print(f"missing: {phase.name.lower()} bucket {bucket.shape}")
    print(_summary(report, check))
    return 1 if report.missing else 0


def _summary(report: CompileCacheReport, check: bool) -> str:
    done = "" if check else f"{report.num_compiled} compiled in {report.seconds:.0f} s. "
    if report.missing:
        return (
            f"{done}{report.directory} lacks programs of {len(report.missing)} of "
            f"{report.num_buckets} buckets"
        )
    if report.missing is None:
        return f"{done}Programs of {report.num_buckets} buckets were made for {report.directory}"
    return f"{done}{report.directory} has the programs of all {report.num_buckets} buckets"
