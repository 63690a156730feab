"""``python -m trencadis.server``: the same as ``engine-serve``."""

from __future__ import annotations

from trencadis.server.cli import main

if __name__ == "__main__":  # the core process imports this module, too
    raise SystemExit(main())
