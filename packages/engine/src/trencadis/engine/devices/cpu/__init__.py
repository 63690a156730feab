"""The CPU: kernels for linear layers and decode attention, compiled where there is a compiler."""

from trencadis.engine.devices.cpu.device import CPUDevice

__all__ = ["CPUDevice"]
