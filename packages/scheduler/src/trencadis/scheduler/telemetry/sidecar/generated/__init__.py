"""Written by ``python -m trencadis.scheduler.telemetry.regenerate`` from ``temperature.proto``."""
