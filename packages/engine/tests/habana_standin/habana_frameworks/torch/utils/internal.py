"""Which mode the process is in. Source: ``habana_frameworks/torch/utils/internal.py``.

The default was 1 in that file and is 0 in the newest list of variables,
https://docs.habana.ai/en/latest/PyTorch/Reference/Runtime_Flags.html: ask, do not assume.
"""

import os


def is_lazy() -> bool:
    return os.getenv("PT_HPU_LAZY_MODE", "1") != "0"
