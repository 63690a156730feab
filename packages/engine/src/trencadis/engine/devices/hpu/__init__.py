"""Intel Gaudi. Importing this needs none of Intel's software; making an `HPUDevice` does."""

from trencadis.engine.devices.hpu.device import HPUDevice

__all__ = ["HPUDevice"]
