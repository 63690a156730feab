"""The page of a Prometheus exporter (``pip install 'trencadis-scheduler[exporter]'``)."""

from __future__ import annotations

import ssl
import time
import urllib.parse
import urllib.request
from collections.abc import Iterable
from http.client import HTTPException
from typing import Any

import attrs

from trencadis.scheduler.errors import ConfigError
from trencadis.scheduler.telemetry.errors import SensorError
from trencadis.scheduler.telemetry.exporter_metrics import (
    DCGM_BLANK,
    EXPORTERS,
    ROCM_PREFIX,
    ExporterMetrics,
)
from trencadis.scheduler.telemetry.source import (
    Reading,
    Sensor,
    TemperatureSource,
    import_extra,
    split_options,
)
from trencadis.scheduler.validators import instance_of, number

_TLS_OPTIONS = ("authority", "certificate", "key")

MAX_BYTES = 16 << 20
"""Largest page that is read. A node with eight devices has a few hundred kilobytes."""


@attrs.frozen
class _Sample:
    metric: str
    labels: dict[str, str]
    value: float


class ExporterSource(TemperatureSource):
    """The devices on the page at ``url``, of any vendor in `EXPORTERS`.

    ``sensor``: which temperature counts. ``label``: the label with the device index, if it is not
    the vendor's. ``timeout_s``: limit of a complete scrape, in seconds. ``tls``: for an https page
    with its own certificate authority. No proxy is used. A page has no age of its values: an
    exporter that collects every 30 s (the default of dcgm-exporter) is up to 30 s late. Let it
    collect as often as the reader reads. Raises `ConfigError` and `MissingExtra`.
    """

    def __init__(
        self,
        url: str,
        *,
        sensor: Sensor = Sensor.CHIP,
        label: str | None = None,
        timeout_s: float = 2.0,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        instance_of(str).checked("exporter url", url)
        instance_of(Sensor).checked("sensor", sensor)
        if urllib.parse.urlsplit(url).scheme not in {"http", "https"}:
            raise ConfigError(
                f"exporter url {url!r} is neither http nor https: "
                "use a complete address, for example http://localhost:9400/metrics"
            )
        self._url = url
        self._sensor = sensor
        self._label = label
        self._timeout_s = number(0, exclusive_low=True).checked("timeout_s", timeout_s)
        parser = import_extra(
            "prometheus_client.parser", library="prometheus-client", extra="exporter"
        )
        self._families = parser.text_string_to_metric_families
        self._opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=tls)
        )

    @classmethod
    def from_argument(cls, argument: str) -> ExporterSource:
        """The source ``exporter:url#name=value,...``.

        Options: ``authority``, the PEM file of the authority that signed the page's certificate;
        ``certificate`` and ``key``, PEM files of the client's own; ``label`` and ``sensor``, as in
        the constructor.
        """
        url, options = split_options(argument, (*_TLS_OPTIONS, "label", "sensor"))
        files = {name: options[name] for name in _TLS_OPTIONS if name in options}
        if files and not url.startswith("https:"):
            raise ConfigError(f"exporter url {url!r} is not https: leave out {', '.join(files)}")
        return cls(
            url,
            sensor=Sensor.from_argument(options.get("sensor", "")),
            label=options.get("label"),
            tls=_tls_context(**files) if files else None,
        )

    @property
    def name(self) -> str:
        return "exporter"

    def read(self) -> list[Reading]:
        """One reading for each device on the page. Raises `SensorError` if there is none."""
        try:
            page = self._fetch()
        except (OSError, HTTPException) as error:
            reason = getattr(error, "reason", None) or error
            raise SensorError(f"{self._url} does not answer: {reason}") from error
        for metrics in EXPORTERS:
            samples = self._samples(page, metrics)
            if samples:
                return self._readings(samples, metrics)
        raise SensorError(
            f"{self._url} has no temperature of "
            f"{', '.join(metrics.vendor for metrics in EXPORTERS)}"
        )

    def _fetch(self) -> str:
        """The page. Raises if it exceeds the limits of time and size."""
        deadline_s = time.monotonic() + self._timeout_s
        page = bytearray()
        with self._opener.open(self._url, timeout=self._timeout_s) as response:
            while chunk := response.read1(1 << 16):
                page += chunk
                if len(page) > MAX_BYTES:
                    raise SensorError(f"{self._url} sends more than {MAX_BYTES} bytes")
                if time.monotonic() > deadline_s:
                    raise TimeoutError(f"not complete after {self._timeout_s:g} s")
        return page.decode("utf-8", errors="replace")

    def _samples(self, page: str, metrics: ExporterMetrics) -> list[_Sample]:
        """Parse the lines of the vendor's metrics only: fast, and independent of other lines."""
        names = {name.lower(): name for name in metrics.names}
        lines = [line for line in page.splitlines() if _metric_of(line) in names]
        try:
            families = list(self._families("\n".join(lines) + "\n"))
        except ValueError as error:
            raise SensorError(f"{self._url} is not in Prometheus' text format: {error}") from error
        return [
            _Sample(names[_normalized(sample.name)], sample.labels, float(sample.value))
            for sample in _all_samples(families)
            if not sample.value >= DCGM_BLANK  # NaN stays: the plausibility check rejects it
        ]

    def _readings(self, samples: list[_Sample], metrics: ExporterMetrics) -> list[Reading]:
        by_device: dict[int, dict[str, float]] = {}
        for sample in samples:
            values = by_device.setdefault(self._device(sample, metrics), {})
            # Partitions, memory stacks and pods repeat a device: the hottest counts.
            before = values.get(sample.metric, sample.value)
            values[sample.metric] = max(before, sample.value)
        readings = []
        for device, values in sorted(by_device.items()):
            temperature_c = self._sensor.select(
                _first(values, metrics.chip), _first(values, metrics.memory)
            )
            power = _first(values, metrics.power)
            power_w = None if power is None else power * metrics.watts_per_unit
            if temperature_c is not None:
                readings.append(Reading(device, temperature_c, power_w))
        if not readings:
            raise SensorError(f"{self._url} has no {self._sensor.value} temperature")
        return readings

    def _device(self, sample: _Sample, metrics: ExporterMetrics) -> int:
        label = self._label or metrics.label
        index = sample.labels.get(label, "")
        if not index.isdecimal():
            raise SensorError(
                f"{self._url}: {sample.metric} has no device index in label {label!r} "
                f"(its labels: {sample.labels}): set label to the right one"
            )
        return int(index)


def _normalized(name: str) -> str:
    return name.lower().removeprefix(ROCM_PREFIX)


def _metric_of(line: str) -> str:
    return _normalized(line.split("{", 1)[0].split(" ", 1)[0])


def _all_samples(families: Iterable[Any]) -> list[Any]:
    return [sample for family in families for sample in family.samples]


def _first(values: dict[str, float], names: tuple[str, ...]) -> float | None:
    return next((values[name] for name in names if name in values), None)


def _tls_context(
    authority: str | None = None, certificate: str | None = None, key: str | None = None
) -> ssl.SSLContext:
    """Raises `ConfigError` for files that are not certificates."""
    if (certificate is None) != (key is None):
        raise ConfigError("a client certificate needs its key: give both, or neither")
    try:
        context = ssl.create_default_context(cafile=authority)
        if certificate is not None:
            context.load_cert_chain(certificate, key)
    except OSError as error:  # ssl.SSLError is one
        files = ", ".join(filter(None, (authority, certificate, key)))
        raise ConfigError(f"{files} cannot be used as PEM files: {error}") from error
    return context
