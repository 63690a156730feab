"""Versions of the software: that it is installed, loads, and is of one release."""

from __future__ import annotations

import importlib
import importlib.util
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from importlib import metadata

from trencadis.engine.doctor.finding import Finding, Status, absent

_PACKAGES = ("bucketing", "kvcache", "warmup", "scheduler", "engine")
_BRIDGE, _PLUGIN = "habana_frameworks", "habana-torch-plugin"
_GAUDI_INSTALL = "https://docs.habana.ai/en/latest/Installation_Guide/"
_TOOL_SECONDS = 20.0


def examine(name: str, *, wants_gaudi: bool) -> Finding:
    """The finding of one of ``SOFTWARE``. ``wants_gaudi``: the user named the device hpu."""
    if name in ("torch", "transformers"):
        return _of_module(name)
    others: Mapping[str, Callable[[], Finding]] = {
        "python": _of_python,
        "trencadis": _of_packages,
        "bridge": lambda: _of_bridge(wants_gaudi=wants_gaudi),
        "driver": _of_driver,
    }
    return others[name]()


def _of_python() -> Finding:
    version = platform.python_version()
    return Finding(
        Status.OK,
        f"{version} on {platform.system()} {platform.machine()}",
        values={"version": version, "machine": platform.machine()},
    )


def _of_module(name: str) -> Finding:
    try:
        version = str(importlib.import_module(name).__version__)
    except ImportError as error:
        return Finding(Status.FAILED, f"it cannot be imported: {error}", f"pip install {name}")
    return Finding(Status.OK, version, values={"version": version})


def _of_packages() -> Finding:
    for package in _PACKAGES:
        importlib.import_module(f"trencadis.{package}")
    found = {name: _version_of(f"trencadis-{name}") or "on the path" for name in _PACKAGES}
    if len(set(found.values())) == 1:
        return Finding(Status.OK, found["engine"], values=found)
    said = ", ".join(f"{package} {version}" for package, version in found.items())
    return Finding(Status.DIFFERS, said, "install all packages of one release", found)


def _of_bridge(*, wants_gaudi: bool) -> Finding:
    if importlib.util.find_spec(_BRIDGE) is None:
        if wants_gaudi:
            return Finding(
                Status.FAILED,
                f"{_BRIDGE} is not installed",
                f"install {_PLUGIN} of the driver's release ({_GAUDI_INSTALL}), or run Intel's "
                "PyTorch image",
            )
        return absent("no software for Gaudi is installed")
    # Not imported here: a bridge that does not load is a finding of the device.
    version = _version_of(_PLUGIN)
    if version is None:
        return Finding(Status.OK, f"{_BRIDGE} without the package {_PLUGIN}")
    return Finding(Status.OK, f"{_PLUGIN} {version}", values={"version": version})


def _of_driver() -> Finding:
    """The version that the driver's tool prints, and whether the bridge is of its release."""
    nvidia = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    for command in (["hl-smi"], nvidia):
        if shutil.which(command[0]) is None:
            continue
        found = subprocess.run(  # noqa: S603  (the device's own tool)
            command, capture_output=True, text=True, timeout=_TOOL_SECONDS, check=False
        )
        number = r"\d+\.\d+[\w.\-]*"
        match = re.search(rf"Driver Version:\s*({number})|^({number})\s*$", found.stdout, re.M)
        if found.returncode or match is None:
            said = f"{command[0]} says no version (exit status {found.returncode})"
            return Finding(Status.FAILED, said, "see that the driver is loaded")
        version = match[1] or match[2]
        return _beside_bridge(version) if command[0] == "hl-smi" else _driver(version)
    return absent("neither hl-smi nor nvidia-smi is on the PATH")


def _driver(version: str) -> Finding:
    return Finding(Status.OK, version, values={"version": version})


def _beside_bridge(driver: str) -> Finding:
    bridge = _version_of(_PLUGIN)
    if bridge is None or bridge.split(".")[:2] == driver.split(".")[:2]:
        return _driver(driver)
    return Finding(
        Status.DIFFERS,
        f"driver {driver}, {_PLUGIN} {bridge}",
        f"install driver and bridge of one release, see {_GAUDI_INSTALL}",
        {"version": driver},
    )


def _version_of(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
