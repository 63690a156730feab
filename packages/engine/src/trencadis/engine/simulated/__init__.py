"""A simulated accelerator: models the time, memory and heat of serving, without tensors.

Needs neither PyTorch nor transformers. `Simulation` serves a trace on it with the real scheduler,
cache, buckets and warm-up. `SimulatedRunner` and `SimulatedRuntime` are the device.
"""

from trencadis.engine.simulated.clock import SimulatedClock
from trencadis.engine.simulated.config import SimulationConfig
from trencadis.engine.simulated.cost_model import CostModel, ForwardTimes, Part, Work
from trencadis.engine.simulated.hardware import HARDWARE, Hardware, find_hardware
from trencadis.engine.simulated.heat import SimulatedHeat
from trencadis.engine.simulated.memory_model import MemoryModel
from trencadis.engine.simulated.model_shape import ModelShape, read_model_shape
from trencadis.engine.simulated.records import Sample, StepTimes
from trencadis.engine.simulated.report import Percentiles, SimulationReport, report_of
from trencadis.engine.simulated.runner import SimulatedRunner
from trencadis.engine.simulated.runtime import SimulatedRuntime
from trencadis.engine.simulated.simulation import Simulation
from trencadis.engine.simulated.static_batch import static_batch_s
from trencadis.engine.simulated.workload import Workload, read_workload

__all__ = [
    "HARDWARE",
    "CostModel",
    "ForwardTimes",
    "Hardware",
    "MemoryModel",
    "ModelShape",
    "Part",
    "Percentiles",
    "Sample",
    "SimulatedClock",
    "SimulatedHeat",
    "SimulatedRunner",
    "SimulatedRuntime",
    "Simulation",
    "SimulationConfig",
    "SimulationReport",
    "StepTimes",
    "Work",
    "Workload",
    "find_hardware",
    "read_model_shape",
    "read_workload",
    "report_of",
    "static_batch_s",
]
