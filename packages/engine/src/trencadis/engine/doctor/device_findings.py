"""The device itself, its kernels, its memory."""

from __future__ import annotations

import torch

from trencadis.engine.devices import select_device
from trencadis.engine.devices.hpu.bridge import is_installed
from trencadis.engine.devices.kernel_trial import (
    TOLERANCE,
    MissingKernelError,
    largest_difference,
)
from trencadis.engine.doctor.finding import Finding, Status, absent
from trencadis.engine.doctor.served_engine import ServedEngine
from trencadis.warmup import format_bytes


def describe_device(engine: ServedEngine) -> Finding:
    """Name, mode and memory. Raises where a Gaudi's software is there and finds no Gaudi."""
    device = engine.device
    if engine.config.device == "auto" and device.name != "hpu" and is_installed():
        select_device("hpu")
    total, free = device.total_memory(), device.free_memory()
    modes = {
        "captures_graphs": device.supports_graphs,
        "has_compiler": device.compiler_missing() is None,
    }
    said = [device.product_name()]
    said += [name.replace("_", " ") for name, present in modes.items() if present]
    said += [f"{format_bytes(free)} of {format_bytes(total)} free"]
    named = {"name": device.name, "product": device.product_name()}
    values = {**named, **modes, "total_bytes": total, "free_bytes": free}
    return Finding(Status.OK, ", ".join(said), values=values)


def try_kernel(engine: ServedEngine, name: str) -> Finding:
    """A kernel at the model's shapes, beside the host's result."""
    trials = engine.device.kernel_trials(engine.spec, engine.dtype)
    if name not in trials:
        return absent(f"{engine.device.name} has no such kernel")
    try:
        with torch.inference_mode():
            largest = largest_difference(*trials[name]())
    except MissingKernelError as error:
        return absent(f"this release lacks it: {error}")
    accepted = TOLERANCE[engine.dtype]
    status = Status.OK if largest <= accepted else Status.DIFFERS
    said = f"error {largest:.2g}, accepted {accepted:g}"
    # As text: JSON has no infinity.
    return Finding(status, said, values={"error": f"{largest:g}", "accepted": accepted})


def describe_memory(engine: ServedEngine) -> Finding:
    """The device's memory before the engine and after the checks so far."""
    engine.device.synchronize()
    before, after = engine.used_before, engine.used_bytes()
    said = f"{format_bytes(before)} in use before the engine, {format_bytes(after)} now"
    return Finding(Status.OK, said, values={"before_bytes": before, "after_bytes": after})
