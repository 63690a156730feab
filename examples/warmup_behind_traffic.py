"""A runtime that serves after its first two buckets, and compiles the others while it is idle."""

from __future__ import annotations

from trencadis.bucketing import Bucket, BucketGrid
from trencadis.warmup import BackgroundWarmup, Phase


class Host:
    """Yours: it compiles a shape when it first runs. This one has a clock instead of a device."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.compiled: set[tuple[Phase, Bucket]] = set()

    def execute(self, phase: Phase, bucket: Bucket) -> None:
        self.now_s += 0.01 if (phase, bucket) in self.compiled else 2.0
        self.compiled.add((phase, bucket))

    def synchronize(self) -> None:
        """Wait for the device."""

    def free_memory(self) -> int:
        return 8 << 30


def main() -> None:
    host = Host()
    prompts = BucketGrid({"batch": (1, 4), "length": (128, 512, 2048)})
    decodes = BucketGrid({"batch": (1, 4, 16)})
    warmup = BackgroundWarmup(host, prompts.buckets, decodes.buckets, clock=lambda: host.now_s)
    while not warmup.ready:
        warmup.advance()
    print(f"serves after {host.now_s:.0f} s")
    bucket = prompts.find((1, 1700)) or prompts.fallback((1, 1700))  # the first request
    if not warmup.is_ready(Phase.PROMPT, bucket):
        host.execute(Phase.PROMPT, bucket)  # it waits for the compiler
        warmup.mark_ready(Phase.PROMPT, bucket)
    while warmup.advance() is not None:  # whenever no request waits
        pass
    progress = warmup.progress
    print(f"{progress.done} of {progress.total} buckets are ready after {host.now_s:.0f} s")


if __name__ == "__main__":
    main()
