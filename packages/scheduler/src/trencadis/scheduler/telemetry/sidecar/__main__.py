"""``python -m trencadis.scheduler.telemetry.sidecar`` is ``thermal-sidecar``."""

import sys

from trencadis.scheduler.telemetry.sidecar.cli import main

if __name__ == "__main__":
    sys.exit(main())
