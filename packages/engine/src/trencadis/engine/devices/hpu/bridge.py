"""Loads Intel's PyTorch bridge, ``habana_frameworks``, when the device is hpu."""

from __future__ import annotations

import importlib
import importlib.util
import os
from pathlib import Path
from typing import Any

import attrs

from trencadis.engine.errors import DeviceError

RECIPE_CACHE = "PT_HPU_RECIPE_CACHE_CONFIG"
"""``PATH,DELETE,SIZE_MB``, read when the bridge is loaded.
https://docs.habana.ai/en/latest/PyTorch/Reference/Runtime_Flags.html"""

_RECIPE_CACHE_MB = 16384
"""The size that Intel's launch scripts for vLLM use (HabanaAI/vllm-fork)."""

_INSTALL = "https://docs.habana.ai/en/latest/Installation_Guide/"


@attrs.frozen
class Bridge:
    """The modules of the bridge that this engine uses.

    ``hpu`` is ``torch.hpu``; ``core`` has ``mark_step``. ``lazy``: operations are collected until
    ``mark_step``, and graphs can be captured. Otherwise operations run at once and modules can be
    compiled. ``PT_HPU_LAZY_MODE`` selects the mode; its default differs between releases.
    """

    hpu: Any
    core: Any
    lazy: bool

    def num_compilations(self) -> int:
        """Recipes compiled so far: the bridge's metric ``graph_compilation``.

        Source: ``habana_frameworks/torch/hpu/metrics/metrics.py``.
        """
        metrics = importlib.import_module("habana_frameworks.torch.hpu.metrics")
        return int(dict(metrics.metric_global("graph_compilation").stats())["TotalNumber"])


def is_installed() -> bool:
    """Whether the bridge is installed."""
    return importlib.util.find_spec("habana_frameworks") is not None


def load_bridge(recipe_cache: Path | None = None) -> Bridge:
    """Load the bridge and check that a device is available.

    ``recipe_cache``: a directory on a local disk that caches compiled recipes for the next start;
    the environment variable takes precedence. Raises `DeviceError` that says what to install.
    """
    if not is_installed():
        raise DeviceError(
            "device hpu needs habana_frameworks, which is not installed: install Intel Gaudi's "
            f"PyTorch packages (habana-torch-plugin, see {_INSTALL}), or choose another device"
        )
    if recipe_cache is not None:
        _keep_recipes(recipe_cache)
    try:
        bridge = _load()
        available = bridge.hpu.is_available()
    except Exception as error:  # the driver's libraries raise errors of any type
        raise DeviceError(
            f"device hpu: habana_frameworks does not load ({_first_line(error)}): install "
            "habanalabs-graph, habanalabs-thunk and habanalabs-dkms of the release that "
            f"habana-torch-plugin and torch are of, see {_INSTALL}"
        ) from error
    if not available:
        raise DeviceError(
            "device hpu: habana_frameworks is installed but finds no Gaudi: check `hl-smi`, and "
            f"install the driver (habanalabs-dkms) and firmware of its release, see {_INSTALL}"
        )
    return bridge


def _keep_recipes(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DeviceError(
            f"compile_cache {directory} cannot be used ({error.strerror}): name a directory that "
            "can be written"
        ) from error
    os.environ.setdefault(RECIPE_CACHE, f"{directory},false,{_RECIPE_CACHE_MB}")


def _load() -> Bridge:
    # The import registers the device, its kernels and its compiler.
    importlib.import_module("habana_frameworks.torch")
    internal = importlib.import_module("habana_frameworks.torch.utils.internal")
    return Bridge(
        importlib.import_module("habana_frameworks.torch.hpu"),
        importlib.import_module("habana_frameworks.torch.core"),
        internal.is_lazy(),
    )


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__
