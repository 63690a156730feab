"""Which mode the process is in. Source: ``habana_frameworks/torch/utils/internal.py:26-29``.

The default is 0, eager mode with ``torch.compile``, in the list of variables,
https://docs.habana.ai/en/latest/PyTorch/Reference/Runtime_Flags.html. It was 1 up to 1.19.
"""

import os


def is_lazy() -> bool:
    return os.getenv("PT_HPU_LAZY_MODE", "0") != "0"
