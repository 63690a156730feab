"""NVML and HLML through their real Python bindings, with a native library written in Python.

The code of the bindings runs: names, argument types, error classes. Only the shared library is
replaced. Also psutil, with its one function replaced, and the registry of sources.
"""

from __future__ import annotations

import ctypes
import pkgutil
import re
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

import pytest

from trencadis.scheduler.errors import ConfigError
from trencadis.scheduler.telemetry import SOURCES, MissingExtra, Sensor, SensorError, open_source
from trencadis.scheduler.telemetry.hlml import HlmlSource
from trencadis.scheduler.telemetry.nvml import NvmlSource
from trencadis.scheduler.telemetry.sensors import HostSensorSource

PAGE = Path(__file__).parents[3] / "docs" / "scheduler" / "telemetry.md"

UNINITIALIZED, NOT_SUPPORTED, ALREADY_INITIALIZED, IS_LOST = 1, 3, 5, 15
"""Return codes: NVML's and HLML's are the same numbers."""


class Board:
    """One accelerator, as its driver reports it. None: not supported."""

    def __init__(
        self,
        chip: int,
        memory: int | None = 60,
        milliwatts: int | None = 350_250,
        module: int = 0,
    ):
        self.chip = chip
        self.module = module
        self.memory = memory
        self.milliwatts = milliwatts
        self.lost = False


def put(reference: Any, value: int | None, lost: bool = False) -> int:
    """Fill an out parameter and return a code, as a native function does."""
    if lost:
        return IS_LOST
    if value is None:
        return NOT_SUPPORTED
    reference._obj.value = value
    return 0


class NativeNvml:
    """The functions of libnvidia-ml.so.1 that are called."""

    def __init__(self, boards: list[Board], init: int = 0) -> None:
        self.boards = boards
        self.init = init
        self.inits = 0
        self.shutdowns = 0

    def nvmlInitWithFlags(self, flags: int) -> int:
        self.inits += self.init == 0
        return self.init

    def nvmlShutdown(self) -> int:
        self.shutdowns += 1
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        return put(count, len(self.boards))

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> int:
        # A handle is an opaque pointer: here, the address 1 above the index, so never null.
        handle._obj.contents = type(handle._obj)._type_.from_address(index.value + 1)
        return 0

    def board(self, handle: Any) -> Board:
        return self.boards[ctypes.addressof(handle.contents) - 1]

    def nvmlDeviceGetTemperatureV(self, handle: Any, answer: Any) -> int:
        board = self.board(handle)
        if board.lost:
            return IS_LOST
        assert answer._obj.sensorType == 0
        answer._obj.temperature = board.chip
        return 0

    def nvmlDeviceGetFieldValues(self, handle: Any, count: Any, values: Any) -> int:
        board, answer = self.board(handle), values._obj[0]
        assert (count.value, answer.fieldId) == (1, 82)  # NVML_FI_DEV_MEMORY_TEMP
        answer.nvmlReturn = 0 if board.memory is not None else NOT_SUPPORTED
        answer.value.uiVal = board.memory or 0
        return IS_LOST if board.lost else 0

    def nvmlDeviceGetPowerUsage(self, handle: Any, milliwatts: Any) -> int:
        board = self.board(handle)
        return put(milliwatts, board.milliwatts, board.lost)


class OldNativeNvml(NativeNvml):
    """A driver without nvmlDeviceGetTemperatureV."""

    def __getattribute__(self, name: str) -> Any:
        if name == "nvmlDeviceGetTemperatureV":
            raise AttributeError(name)
        return super().__getattribute__(name)

    def nvmlDeviceGetTemperature(self, handle: Any, sensor: Any, celsius: Any) -> int:
        assert sensor.value == 0
        board = self.board(handle)
        return put(celsius, board.chip, board.lost)


class NativeHlml:
    """The functions of libhlml.so that are called."""

    def __init__(self, boards: list[Board], init: int = 0) -> None:
        self.boards = boards
        self.init = init
        self.shutdowns = 0

    def hlml_init(self) -> int:
        return self.init

    def hlml_shutdown(self) -> int:
        self.shutdowns += 1
        return 0

    def hlml_device_get_count(self, count: Any) -> int:
        return put(count, len(self.boards))

    def hlml_device_get_handle_by_index(self, index: int, handle: Any) -> int:
        handle._obj.value = index + 1
        return 0

    def hlml_device_get_temperature(self, handle: Any, sensor: int, celsius: Any) -> int:
        board = self.boards[handle.value - 1]
        return put(celsius, {0: board.chip, 3: board.memory}[sensor], board.lost)

    def hlml_device_get_module_id(self, handle: Any, module: Any) -> int:
        board = self.boards[handle.value - 1]
        return put(module, board.module, board.lost)

    def hlml_device_get_power_usage(self, handle: Any, milliwatts: Any) -> int:
        board = self.boards[handle.value - 1]
        return put(milliwatts, board.milliwatts, board.lost)


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Any]:
    pynvml = pytest.importorskip("pynvml")

    def install(native: Any) -> Any:
        monkeypatch.setattr(pynvml, "nvmlLib", native)
        monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
        return native

    return install


@pytest.fixture
def hlml(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Any]:
    pytest.importorskip("pyhlml")
    library = sys.modules["pyhlml.hlml_lib"]

    def install(native: Any) -> Any:
        monkeypatch.setattr(library, "ctypes", SimpleNamespace(CDLL=lambda path: native))
        return native

    return install


def test_nvml_reads_every_device_with_its_power_in_watts(nvml: Callable[[Any], Any]) -> None:
    native = nvml(NativeNvml([Board(61), Board(74, milliwatts=699_125)]))
    source = NvmlSource()
    readings = source.read()
    assert [(r.device, r.temperature_c, r.power_w) for r in readings] == [
        (0, 61.0, 350.25),
        (1, 74.0, 699.125),
    ]
    source.read()
    source.close()
    assert (native.inits, native.shutdowns) == (1, 1)


def test_nvml_of_an_older_driver_is_read(nvml: Callable[[Any], Any]) -> None:
    nvml(OldNativeNvml([Board(58)]))
    assert NvmlSource().read()[0].temperature_c == 58.0


@pytest.mark.parametrize(
    ("sensor", "expected"), [(Sensor.CHIP, 61.0), (Sensor.MEMORY, 83.0), (Sensor.HOTTEST, 83.0)]
)
def test_nvml_reads_the_selected_sensor(
    nvml: Callable[[Any], Any], sensor: Sensor, expected: float
) -> None:
    nvml(NativeNvml([Board(61, memory=83)]))
    assert NvmlSource(sensor).read()[0].temperature_c == expected


def test_an_nvml_board_without_memory_sensor_and_power(nvml: Callable[[Any], Any]) -> None:
    nvml(NativeNvml([Board(61, memory=None, milliwatts=None)]))
    assert NvmlSource(Sensor.HOTTEST).read()[0] == NvmlSource().read()[0]
    assert NvmlSource().read()[0].power_w is None
    with pytest.raises(SensorError, match="device 0: it has no memory sensor"):
        NvmlSource(Sensor.MEMORY).read()


def test_a_lost_nvml_device_is_skipped(
    nvml: Callable[[Any], Any],
) -> None:
    native = nvml(NativeNvml([Board(61), Board(70)]))
    source = NvmlSource()
    native.boards[0].lost = True
    assert [reading.device for reading in source.read()] == [1]


def test_nvml_is_initialized_again_after_all_devices_were_lost(nvml: Callable[[Any], Any]) -> None:
    native = nvml(NativeNvml([Board(61)]))
    source = NvmlSource()
    native.boards[0].lost = True
    with pytest.raises(SensorError, match="nvml device 0: GPU is lost"):
        source.read()
    native.boards[0].lost = False
    assert source.read()[0].temperature_c == 61.0
    assert (native.inits, native.shutdowns) == (2, 1)


def test_nvml_without_a_driver_is_a_sensor_error_until_it_is_loaded(
    nvml: Callable[[Any], Any],
) -> None:
    native = nvml(NativeNvml([Board(61)], init=9))
    source = NvmlSource()
    with pytest.raises(SensorError, match="nvml does not answer: Driver Not Loaded"):
        source.read()
    native.init = 0
    assert source.read()[0].temperature_c == 61.0


def test_nvml_without_devices_is_a_sensor_error(nvml: Callable[[Any], Any]) -> None:
    nvml(NativeNvml([]))
    with pytest.raises(SensorError, match="nvml lists no device"):
        NvmlSource().read()


def test_hlml_reads_every_device_with_its_power_in_watts(hlml: Callable[[Any], Any]) -> None:
    native = hlml(NativeHlml([Board(55), Board(57, milliwatts=600_500)]))
    source = HlmlSource()
    assert [(r.device, r.temperature_c, r.power_w) for r in source.read()] == [
        (0, 55.0, 350.25),
        (1, 57.0, 600.5),
    ]
    source.close()
    assert native.shutdowns == 1


def test_hlml_reads_the_memory_if_the_driver_supports_it(hlml: Callable[[Any], Any]) -> None:
    hlml(NativeHlml([Board(55, memory=72)]))
    assert HlmlSource(Sensor.MEMORY).read()[0].temperature_c == 72.0
    hlml(NativeHlml([Board(55, memory=None)]))
    assert HlmlSource(Sensor.HOTTEST).read()[0].temperature_c == 55.0


def test_hlml_finds_a_device_by_its_module_whatever_its_place(hlml: Callable[[Any], Any]) -> None:
    native = hlml(NativeHlml([Board(55, module=6), Board(56, module=2), Board(57, module=0)]))
    source = HlmlSource()
    assert [source.index_of_module(module) for module in (0, 2, 6, 5)] == [2, 1, 0, None]
    assert len(source.read()) == 3
    source.close()
    assert native.shutdowns == 1
    native.boards[0].lost = True
    with pytest.raises(SensorError, match="hlml cannot tell which device is module 2"):
        source.index_of_module(2)


def test_hlml_that_is_already_initialized_is_ready(hlml: Callable[[Any], Any]) -> None:
    hlml(NativeHlml([Board(55)], init=ALREADY_INITIALIZED))
    assert HlmlSource().read()[0].temperature_c == 55.0


def test_an_hlml_device_that_is_lost_is_named(hlml: Callable[[Any], Any]) -> None:
    native = hlml(NativeHlml([Board(55)]))
    native.boards[0].lost = True
    with pytest.raises(SensorError, match=r"hlml device 0: .*HLMLError_AipIsLost"):
        HlmlSource().read()


def test_hlml_without_a_driver_is_a_sensor_error(
    hlml: Callable[[Any], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    hlml(NativeHlml([], init=UNINITIALIZED))
    with pytest.raises(SensorError, match="hlml does not answer"):
        HlmlSource().read()


@pytest.mark.parametrize(
    ("spec", "module", "library", "extra"),
    [
        ("nvml", "pynvml", "nvidia-ml-py", "nvml"),
        ("hlml", "pyhlml", "habana-pyhlml", "hlml"),
        ("sensors", "psutil", "psutil", "sensors"),
        ("exporter:http://localhost/", "prometheus_client", "prometheus-client", "exporter"),
    ],
)
def test_a_missing_library_names_the_extra_to_install(
    monkeypatch: pytest.MonkeyPatch, spec: str, module: str, library: str, extra: str
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [_Missing(module), *sys.meta_path])
    with pytest.raises(MissingExtra) as error:
        open_source(spec)
    assert str(error.value) == (
        f"{library} is not installed: pip install 'trencadis-scheduler[{extra}]'"
    )


class _Missing:
    """An import hook under which ``module`` is not installed."""

    def __init__(self, module: str) -> None:
        self.module = module

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] == self.module:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def test_every_registered_source_loads_and_is_in_the_list() -> None:
    for extra in ("prometheus_client", "psutil", "pynvml", "pyhlml", "grpc", "google.protobuf"):
        pytest.importorskip(extra)
    for kind, path in SOURCES.items():
        assert callable(pkgutil.resolve_name(path)), kind
    page = PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"^- `(\w+)[`:]", page, re.MULTILINE)
    assert rows == list(SOURCES)


@pytest.mark.parametrize("spec", ["", "nvidia-smi", "http://localhost:9400/metrics"])
def test_an_unknown_source_is_an_error_that_lists_the_known_ones(spec: str) -> None:
    with pytest.raises(ConfigError, match="use one of nvml, hlml, sensors, exporter"):
        open_source(spec)


def test_an_unknown_sensor_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(
        ConfigError, match="sensor 'gpu' is unknown: use one of chip, memory, hottest"
    ):
        open_source("nvml:gpu")


def test_telemetry_itself_imports_no_optional_library() -> None:
    script = (
        "import sys, trencadis.scheduler.telemetry as telemetry\n"
        "optional = {'grpc', 'google.protobuf', 'pynvml', 'pyhlml', 'prometheus_client'}\n"
        "sys.exit(str(optional & set(sys.modules)) if optional & set(sys.modules) else 0)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=600)


Temperature = namedtuple("shwtemp", ["label", "current", "high", "critical"])
"""psutil's named tuple, from its documentation."""


def with_sensors(monkeypatch: pytest.MonkeyPatch, **chips: list[float | None]) -> None:
    psutil = pytest.importorskip("psutil")
    found = {
        chip: [Temperature("", current, None, None) for current in currents]
        for chip, currents in chips.items()
    }
    monkeypatch.setattr(psutil, "sensors_temperatures", lambda: found, raising=False)


def test_the_hottest_cpu_sensor_of_the_host_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    with_sensors(monkeypatch, coretemp=[51.0, 62.5, None], nvme=[80.0])
    assert [(r.device, r.temperature_c) for r in HostSensorSource().read()] == [(0, 62.5)]


def test_the_sensors_of_the_host_are_named_as_their_source() -> None:
    pytest.importorskip("psutil")
    assert open_source("sensors").name == "sensors"


def test_only_the_selected_chips_count(monkeypatch: pytest.MonkeyPatch) -> None:
    with_sensors(monkeypatch, coretemp=[51.0], nvme=[44.0])
    assert open_source("sensors:nvme").read()[0].temperature_c == 44.0
    with pytest.raises(
        SensorError, match="no temperature for inlet: its sensors are coretemp, nvme"
    ):
        open_source("sensors:inlet").read()


def test_without_known_chips_the_hottest_sensor_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_sensors(monkeypatch, acpitz=[40.0, 46.0])
    assert HostSensorSource().read()[0].temperature_c == 46.0


def test_sensors_that_cannot_be_read_are_a_sensor_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> NoReturn:
        raise OSError(5, "Input/output error")

    with_sensors(monkeypatch)
    monkeypatch.setattr("psutil.sensors_temperatures", fail)
    with pytest.raises(SensorError, match=r"cannot read the sensors: .*Input/output error"):
        HostSensorSource().read()


def test_a_host_without_sensors_is_a_sensor_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with_sensors(monkeypatch)
    with pytest.raises(SensorError, match="its sensors are none"):
        HostSensorSource().read()
    monkeypatch.setitem(sys.modules, "psutil", ModuleType("psutil"))
    with pytest.raises(SensorError, match="operating system"):
        HostSensorSource().read()
