"""The gRPC service for both ends: its method, and the conversion of messages."""

from __future__ import annotations

import attrs

from trencadis.scheduler.telemetry.errors import MissingExtra
from trencadis.scheduler.telemetry.source import Reading

try:
    import google.protobuf  # noqa: F401  the generated module below needs it
except ModuleNotFoundError as missing:
    raise MissingExtra("protobuf", "sidecar") from missing

from trencadis.scheduler.telemetry.sidecar.generated import temperature_pb2

SERVICE = temperature_pb2.DESCRIPTOR.services_by_name["TemperatureSidecar"].full_name
WATCH = "Watch"
WATCH_PATH = f"/{SERVICE}/{WATCH}"


@attrs.frozen
class Round:
    """One round of readings of a node, at ``taken_at_s`` on the local clock, in seconds."""

    readings: tuple[Reading, ...]
    fault: str
    source: str
    taken_at_s: float

    def aged(self, now_s: float) -> list[Reading]:
        """The readings with their ages at ``now_s``."""
        waited_s = max(0.0, now_s - self.taken_at_s)
        return [attrs.evolve(reading, age_s=reading.age_s + waited_s) for reading in self.readings]


def to_message(this_round: Round, now_s: float) -> temperature_pb2.Round:
    """The message for a round, sent at ``now_s`` on the sender's clock."""
    return temperature_pb2.Round(
        readings=[
            temperature_pb2.Reading(
                device=reading.device,
                temperature_c=reading.temperature_c,
                power_w=reading.power_w,
                age_s=reading.age_s,
            )
            for reading in this_round.aged(now_s)
        ],
        fault=this_round.fault,
        source=this_round.source,
    )


def from_message(message: temperature_pb2.Round, now_s: float) -> Round:
    """The round of a message, received at ``now_s`` on the receiver's clock."""
    readings = tuple(
        Reading(
            device=reading.device,
            temperature_c=reading.temperature_c,
            power_w=reading.power_w if reading.HasField("power_w") else None,
            age_s=reading.age_s,
        )
        for reading in message.readings
    )
    return Round(readings, message.fault, message.source, now_s)
