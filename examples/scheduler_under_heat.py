"""A scheduler of yours whose batch follows the temperature and an administrator's orders."""

import attrs

from trencadis.scheduler import BatchControl, BatchLimiter, ThermalGuard
from trencadis.scheduler.thermal import ProportionalThermalPolicy


@attrs.define
class Running:  # yours: what runs, with the attributes of Victim
    request_id: str
    arrival: int
    num_seqs: int = 1
    priority: int = 0
    started_at_s: float = 0.0
    last_scheduled_step: int = 0
    num_tokens_left: int = 100

    def get_num_kv_blocks(self) -> int:
        return 4


@attrs.define
class Sensor:  # yours, or a TemperatureReader: the newest readings
    hottest_c: float | None = 40.0
    temperatures_c: dict[int, float] = attrs.field(factory=dict)
    may_raise_cap: bool = True
    power_w: float | None = None


class Host:  # yours: first come, first served
    def __init__(self) -> None:
        self.waiting = [Running(f"r{number}", number) for number in range(20)]
        self.running: list[Running] = []

    def preempt(self, victim: Running) -> None:
        self.running.remove(victim)
        self.waiting.insert(0, victim)

    def step(self, limiter: BatchLimiter[Running]) -> str:
        limit = limiter.begin_step().max_num_seqs
        while self.waiting and len(self.running) < limit:
            self.running.append(self.waiting.pop(0))
        return f"{len(self.running)} of {limit} run"


def main() -> None:
    host, sensor = Host(), Sensor()
    guard = ThermalGuard(ProportionalThermalPolicy(target_temp_c=80.0), lambda: sensor)
    limiter = BatchLimiter(host, max_num_seqs=16, max_num_batched_tokens=2048, thermal=guard)
    print("cool:", host.step(limiter))
    sensor.hottest_c = 84.0
    print("hot:", host.step(limiter))
    answer = limiter.control(BatchControl(force_evict=3, policy="lowest_priority"))
    print("ordered:", host.step(limiter))
    print("preempted:", *answer.result().evicted_request_ids)


if __name__ == "__main__":
    main()
