"""Loads Intel's PyTorch bridge, ``habana_frameworks``, when the device is hpu."""

from __future__ import annotations

import atexit
import errno
import importlib
import importlib.util
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import attrs
import platformdirs

from trencadis.engine.devices.own_files import other_writer_within
from trencadis.engine.errors import DeviceError

logger = logging.getLogger("trencadis.engine")

LAZY_MODE = "PT_HPU_LAZY_MODE"
"""``1`` selects lazy mode, ``0`` eager mode with ``torch.compile``. Read when the bridge is loaded.
The default is 0 in today's releases and was 1 up to 1.19:
https://docs.habana.ai/en/latest/PyTorch/Reference/Runtime_Flags.html"""

WEIGHT_SHARING = "PT_HPU_WEIGHT_SHARING"
"""``0``: the weights of a graph are not held a second time. vllm-gaudi sets it in both modes
(``vllm_gaudi/platform.py:428``)."""

LAZY_COLLECTIVES = "PT_HPU_ENABLE_LAZY_COLLECTIVES"
"""``true``: in lazy mode collective calls are collected, like operations. Read when the bridge is
loaded (``distributed/hccl/__init__.py:12``)."""

FUSER_THREADS = "FUSER_ENABLE_MULTI_THREADED_INVOCATIONS"
"""``1``: the graph compiler fuses in several threads. vllm-gaudi sets it in eager mode
(``vllm_gaudi/platform.py:455``)."""

RECIPE_CACHE = "PT_HPU_RECIPE_CACHE_CONFIG"
"""``PATH,DELETE,SIZE_MB``, read when the bridge is loaded.
https://docs.habana.ai/en/latest/PyTorch/Reference/Runtime_Flags.html"""

_RECIPE_CACHE_MB = 16384
"""The size that Intel's launch scripts for vLLM use (HabanaAI/vllm-fork)."""

_RECIPE = ".recipe"
_METADATA = ".metadata"
"""The ends of the names of a recipe's files (``cache_file_handler.cpp`` of the bridge)."""

_INSTALL = "https://docs.habana.ai/en/latest/Installation_Guide/"


@attrs.frozen
class Bridge:
    """The modules of the bridge that this engine uses.

    ``hpu`` is ``torch.hpu``; ``core`` has ``mark_step``. ``lazy``: operations are collected until
    ``mark_step``, and graphs can be captured. Otherwise operations run at once and modules can be
    compiled.
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

    def set_compile_only(self, on: bool) -> None:
        """Whether recipes are compiled and not started; nothing in a release that cannot do so.

        Sets ``PT_COMPILE_ONLY_MODE`` (``scripts/env_flags.yaml:725`` of the bridge). Its own
        ``env_setting`` would leave it on after an error (``scripts/generate_env.py:106``).
        """
        try:
            config = importlib.import_module("habana_frameworks.torch.internal.bridge_config")
        except ImportError:
            return
        change = getattr(config, "set_pt_compile_only_mode", None)
        if change is not None:
            change(on)


def is_installed() -> bool:
    """Whether the bridge is installed."""
    return importlib.util.find_spec("habana_frameworks") is not None


def load_bridge(
    recipe_cache: Path | None = None, *, trusted: bool = False, read_only: bool = False
) -> Bridge:
    """Load the bridge and check that a device is available.

    ``recipe_cache``: a directory on a local disk that caches compiled recipes for the next start;
    by default in the user's cache directory. ``trusted``: those of other users, too. ``read_only``:
    none is added to it. Variables of the environment take precedence, and are rejected with
    ``read_only``. Raises `DeviceError` that says what to install.
    """
    if read_only and RECIPE_CACHE in os.environ:
        raise DeviceError(f"{RECIPE_CACHE} names another directory than {recipe_cache}: unset it")
    if not is_installed():
        raise DeviceError(
            "device hpu needs habana_frameworks, which is not installed: install Intel Gaudi's "
            f"PyTorch packages (habana-torch-plugin, see {_INSTALL}), or choose another device"
        )
    _choose_mode()
    os.environ.setdefault(WEIGHT_SHARING, "0")
    if os.environ[LAZY_MODE] == "0":
        os.environ.setdefault(FUSER_THREADS, "1")
    if RECIPE_CACHE not in os.environ:
        _keep_recipes(recipe_cache, trusted, read_only)
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


def _choose_mode() -> None:
    """Set the mode where it is not set. The bridge takes every text but 0 for lazy mode."""
    mode = os.environ.get(LAZY_MODE, "").strip() or "0"
    if mode not in ("0", "1"):
        raise DeviceError(
            f"{LAZY_MODE}={mode!r} names no mode: set 0 for eager mode with torch.compile, or 1 "
            "for lazy mode"
        )
    os.environ[LAZY_MODE] = mode


def _keep_recipes(directory: Path | None, trusted: bool, read_only: bool) -> None:
    """Let the bridge cache recipes in ``directory``, or in the user's cache directory if it can."""
    place = directory or Path(platformdirs.user_cache_dir("trencadis")) / "recipes"
    try:
        if "," in str(place):
            raise OSError(errno.EINVAL, f"{RECIPE_CACHE} allows no comma in a path")
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        place = place.resolve()  # a link could be turned after the check
        if not trusted and (reason := other_writer_within(place)) is not None:
            logger.warning(
                "Recipes in %s are not loaded, since another user may have made them: %s. They are "
                "compiled at each start: make it yours alone (chown, chmod go-w), or pass "
                "--trust-compile-cache",
                place,
                reason,
            )
            return
        place = _copied(place) if read_only else _writable(place)
    except OSError as error:
        if directory is None:
            logger.warning("Recipes are not cached: %s cannot be used (%s)", place, error.strerror)
            return
        raise DeviceError(
            f"compile_cache {directory} cannot be used ({error.strerror}): name a directory that "
            "can be written, or one with recipes"
        ) from error
    os.environ[RECIPE_CACHE] = f"{place},false,{_RECIPE_CACHE_MB}"


def _writable(place: Path) -> Path:
    """``place``, or where it is read-only and has recipes, a temporary directory with them."""
    try:
        with tempfile.TemporaryFile(dir=place):
            return place
    except OSError:
        if not any(place.glob(f"*{_RECIPE}")):
            raise
    logger.info("Recipes are read from %s, which is read-only: new ones are not kept", place)
    return _copied(place)


def _copied(place: Path) -> Path:
    """A temporary directory with the recipes of ``place``, removed at exit.

    The bridge locks the metadata of a recipe to read it, and stores new recipes beside it
    (``recipe_cache.cpp``, ``lookup``). So metadata, which is small, is copied, and recipes are
    linked. Empty metadata is of a recipe that was not stored to its end, which the bridge would
    write again, through a link, too: it is left out.
    """
    own = Path(tempfile.mkdtemp(prefix="trencadis-recipes-"))
    atexit.register(shutil.rmtree, own, ignore_errors=True)
    for path in place.iterdir():
        if path.suffix == _RECIPE:
            if _has_content(path.with_suffix(_METADATA)):
                (own / path.name).symlink_to(path.resolve())
        elif _has_content(path):
            shutil.copyfile(path, own / path.name)
    return own


def _has_content(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0


def _load() -> Bridge:
    # The import, which is that of habana_frameworks.torch, too, registers the device, its kernels
    # and its compiler.
    internal = importlib.import_module("habana_frameworks.torch.utils.internal")
    return Bridge(
        importlib.import_module("habana_frameworks.torch.hpu"),
        importlib.import_module("habana_frameworks.torch.core"),
        internal.is_lazy(),
    )


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__
