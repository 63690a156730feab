"""What a step of the start took: device and host memory before and after it, as one log line."""

from __future__ import annotations

from pathlib import Path

import attrs

from trencadis.warmup.log_lines import format_bytes

_MEMINFO = Path("/proc/meminfo")


@attrs.frozen(kw_only=True)
class MemoryUse:
    """Memory in use at one moment, bytes. ``host_total`` of 0 means that the host's is unknown."""

    device_used: int
    device_total: int
    host_used: int = 0
    host_total: int = 0

    @classmethod
    def read(cls, *, device_free: int, device_total: int, meminfo: Path = _MEMINFO) -> MemoryUse:
        """The device's figures as given, the host's from Linux (``MemTotal``, ``MemAvailable``)."""
        total, available = _host(meminfo)
        return cls(
            device_used=device_total - device_free,
            device_total=device_total,
            host_used=total - available,
            host_total=total,
        )

    def since(self, before: MemoryUse, what: str) -> str:
        """The seeds' line: ``what`` took so much, negative where it was released."""
        device = (
            f"{what} took {format_bytes(self.device_used - before.device_used)} of device memory "
            f"({format_bytes(self.device_used)}/{format_bytes(self.device_total)} used)"
        )
        if not self.host_total:
            return device
        return (
            f"{device} and {format_bytes(self.host_used - before.host_used)} of host memory "
            f"({format_bytes(self.host_used)}/{format_bytes(self.host_total)} used)"
        )


def _host(meminfo: Path) -> tuple[int, int]:
    try:
        lines = meminfo.read_text(encoding="ascii").splitlines()
        sizes = {name: int(rest.split()[0]) for name, _, rest in (x.partition(":") for x in lines)}
        return sizes["MemTotal"] * 1024, sizes["MemAvailable"] * 1024
    except (OSError, ValueError, KeyError, IndexError):
        return 0, 0
