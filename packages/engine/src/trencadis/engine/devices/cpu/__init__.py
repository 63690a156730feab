"""The CPU: weights packed for oneDNN, and a decode attention compiled for the model."""

from trencadis.engine.devices.cpu.device import CPUDevice

__all__ = ["CPUDevice"]
