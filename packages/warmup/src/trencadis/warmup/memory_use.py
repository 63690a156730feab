"""Device and host memory before and after a step of the start-up, for one log line."""

from __future__ import annotations

from pathlib import Path

import attrs

from trencadis.warmup.log_lines import format_bytes
from trencadis.warmup.validators import MAX_BYTES, instance_of, integer

_MEMINFO = Path("/proc/meminfo")


@attrs.frozen(kw_only=True)
class MemoryUse:
    """Memory in use at one moment, bytes. ``host_total`` is 0 if the host's memory is unknown.

    Raises `ConfigError` for anything but integers.
    """

    device_used: int = attrs.field(validator=integer(-MAX_BYTES, MAX_BYTES))
    device_total: int = attrs.field(validator=integer(0, MAX_BYTES))
    host_used: int = attrs.field(default=0, validator=integer(-MAX_BYTES, MAX_BYTES))
    host_total: int = attrs.field(default=0, validator=integer(0, MAX_BYTES))

    @classmethod
    def read(cls, *, device_free: int, device_total: int, meminfo: Path = _MEMINFO) -> MemoryUse:
        """Device memory as given; host memory from Linux (``MemTotal`` and ``MemAvailable``)."""
        integer(-MAX_BYTES, MAX_BYTES).checked("device_free", device_free)
        integer(0, MAX_BYTES).checked("device_total", device_total)
        instance_of(Path).checked("meminfo", meminfo)
        total, available = _host_memory(meminfo)
        return cls(
            device_used=device_total - device_free,
            device_total=device_total,
            host_used=total - available,
            host_total=total,
        )

    def since(self, before: MemoryUse, what: str, *, in_total: bool = False) -> str:
        """The log line of seed 000: how much ``what`` took; negative if memory was released.

        ``in_total``: for a line that sums up those before it.
        """
        instance_of(MemoryUse).checked("before", before)
        took = "took in total" if in_total else "took"
        device = (
            f"{what} {took} {format_bytes(self.device_used - before.device_used)} of device memory "
            f"({format_bytes(self.device_used)}/{format_bytes(self.device_total)} used)"
        )
        if not self.host_total:
            return device
        return (
            f"{device} and {format_bytes(self.host_used - before.host_used)} of host memory "
            f"({format_bytes(self.host_used)}/{format_bytes(self.host_total)} used)"
        )


def _host_memory(meminfo: Path) -> tuple[int, int]:
    """Total and available bytes; both are 0 if they cannot be read."""
    try:
        lines = meminfo.read_text(encoding="ascii").splitlines()
        sizes = {
            name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)
        }
        return sizes["MemTotal"] * 1024, sizes["MemAvailable"] * 1024
    except (OSError, ValueError, KeyError, IndexError):
        return 0, 0
