"""The files of Intel Neural Compressor (INC): its settings, and what its calibration has measured.

A file of settings names the beginning of the others. INC's ``.npz`` files are pickles, which run
code: the ``.json`` files beside them have the same numbers, and are read instead. Paths and lines
in brackets are of intel/neural-compressor 9b47d09, below
``neural_compressor/torch/algorithms/fp8_quant/``.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

from trencadis.engine.errors import ConfigError
from trencadis.engine.models.measured_scales import (
    FP8_RANGES,
    METHODS,
    MeasuredScales,
    Node,
    Rule,
)

_DTYPES = {"BF16": torch.bfloat16, "FP16": torch.float16, "FP32": torch.float32}


def read_measured_scales(
    file: str, device: str, rank: int = 0, num_ranks: int = 1
) -> MeasuredScales:
    """The scales that a file of INC's settings leads to, on a ``device`` of `FP8_RANGES`.

    Those of a rank, where its calibration had as many; else those that were measured on one device.
    Raises `ConfigError` that names file, field and remedy.
    """
    settings = _Settings(file, _json_of(file, "quant_config"))
    name = settings.choice("scale_method", METHODS, "maxabs_hw")
    inputs, weights = METHODS[name]
    settings.check_use(is_dynamic=inputs.by_channel)
    of = FP8_RANGES[settings.device_for_scales(device, name)]
    inputs = attrs.evolve(inputs, backoff=settings.backoff("input_backoff", inputs))
    weights = attrs.evolve(weights, backoff=settings.backoff("weight_backoff", weights))
    nodes, are_scales = dict[str, Node](), False
    if not (inputs.is_fixed and weights.is_fixed) and not inputs.by_channel:
        nodes, are_scales = settings.nodes(name, rank, num_ranks)
    return MeasuredScales(
        file,
        of,
        inputs,
        weights,
        _DTYPES[settings.choice("hp_dtype", _DTYPES, "bf16")],
        nodes,
        are_scales,
        settings.flag("ignore_modules_wo_measures"),
        settings.lists("allowlist", "whitelist"),
        settings.lists("blocklist", "blacklist"),
    )


@attrs.frozen
class _Settings:
    """INC's settings in a file (``_quant_common/quant_config.py:140-330``).

    Those that change how INC measures, or how it hands scales to kernels, have no effect here.
    """

    file: str
    given: Mapping[str, Any]

    def choice(self, name: str, known: Mapping[str, Any], default: str) -> str:
        value = self.given.get(name, default)
        found = str(value).upper()
        if isinstance(value, (dict, list)) or found not in known:
            raise self.error(name, f"one of {', '.join(map(str.lower, known))}")
        return found

    def flag(self, name: str) -> bool:
        return self.choice(name, {"TRUE": True, "FALSE": False}, "false") == "TRUE"

    def check_use(self, *, is_dynamic: bool) -> None:
        """Raise `ConfigError` for settings of another use than to serve in E4M3."""
        for name, value, default in (
            ("mode", "QUANTIZE", "QUANTIZE"),
            ("observer", "MAXABS", "maxabs"),
            ("fp8_config", "E4M3", "E4M3"),
            ("fake_quant", "FALSE", "false"),
        ):
            self.choice(name, {value: None}, default)
        if self.flag("dynamic_quantization") != is_dynamic:
            wanted = "true" if is_dynamic else "false"
            raise self.error("dynamic_quantization", f"{wanted} with this scale_method")

    def device_for_scales(self, device: str, method: str) -> str:
        """Gaudi 2's are allowed on a Gaudi 3, with ``maxabs_hw`` (331-360 there)."""
        if self.given.get("device_for_scales") is None:
            return device
        wanted = self.choice("device_for_scales", FP8_RANGES, device)
        if wanted != device and (wanted, device, method) != ("GAUDI2", "GAUDI3", "MAXABS_HW"):
            raise self.error("device_for_scales", f"{device}, or left out")
        return wanted

    def backoff(self, name: str, rule: Rule) -> float:
        value = (self.given.get("scale_params") or {}).get(name, rule.backoff)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
            raise self.error(f"scale_params.{name}", "above 0 and at most 1", value)
        return float(value)

    def lists(self, *names: str) -> tuple[Sequence[str], Sequence[str]]:
        """Patterns of names, and types."""
        for name in names:
            given = self.given.get(name)
            if given is None:
                continue
            found = []
            for part in ("names", "types"):
                values = given.get(part, []) if isinstance(given, dict) else None
                if not isinstance(values, list) or not all(isinstance(v, str) for v in values):
                    raise self.error(name, "an object with lists of texts, names and types")
                found.append(tuple(values))
            try:
                for pattern in found[0]:
                    re.compile(pattern)
            except re.error:
                raise self.error(name, "with names that are regular expressions") from None
            return found[0], found[1]
        return (), ()

    def nodes(self, method: str, rank: int, num_ranks: int) -> tuple[dict[str, Node], bool]:
        """What was measured, or the scales that INC made of it, which it prefers."""
        start = self.given.get("dump_stats_path", "stats")
        if not isinstance(start, str):
            raise self.error("dump_stats_path", "a text")
        of_rank = f"_{rank}_{num_ranks}" if num_ranks > 1 else ""
        separate = self.choice(
            "seperate_measure_files", {"TRUE": True, "FALSE": False}, "true"
        )  # INC's spelling
        ends = [of_rank, ""] if of_rank and separate == "TRUE" else [""]
        kinds = [("_hooks_maxabs", False)]
        if not self.flag("recalc_scales") and not self.given.get("scale_params"):
            kinds.insert(0, (f"_hooks_maxabs_{method}", True))
        for end in ends:
            for kind, are_scales in kinds:
                path = Path(f"{start}{kind}{end}.json")
                if path.is_file():
                    content = _json_of(str(path), f"quant_config {self.file}")
                    return dict(_nodes_in(content, path)), are_scales
        raise self.error(
            "dump_stats_path", f"how {start}_hooks_maxabs{ends[0]}.json begins, which is not there"
        )

    def error(self, name: str, wanted: str, value: object = None) -> ConfigError:
        shown = self.given.get(name) if value is None else value
        return ConfigError(
            f"quant_config {self.file}: {name} is {shown!r:.100}, and must be {wanted}",
            "quant_config",
        )


def _json_of(file: str, setting: str) -> Mapping[str, Any]:
    try:
        content = json.loads(Path(file).read_text("utf-8"))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"{setting}: {file} cannot be read ({reason}): name a file of JSON that INC or "
            "vllm-gaudi's calibration wrote",
            "quant_config",
        ) from None
    if not isinstance(content, dict):
        raise ConfigError(f"{setting}: {file} is not an object of JSON: name INC's", "quant_config")
    return content


def _nodes_in(content: Mapping[str, Any], path: Path) -> Iterator[tuple[str, Node]]:
    """Nodes of a file of measurements or scales (``_core/common.py:159-260``).

    The largest of an input is ``[[number]]``; a scale a number, or by outputs in ``"0"``.
    """
    nodes = content.get("Nodes")
    try:
        for name, node in dict(nodes or {}).items():
            inputs = node.get("inputs", node.get("input"))
            weight = (node.get("params") or {}).get("weight", [])
            of_outputs = weight.get("0") if isinstance(weight, dict) else weight
            largest = [max(_numbers(each)) for each in inputs]
            yield name, Node(largest, tuple(_numbers(of_outputs)))
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"quant_config: {path} is not of INC's form ({error}): calibrate again", "quant_config"
        ) from None


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, list):
        for each in value:
            yield from _numbers(each)
    elif isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{value!r:.40} is not a number")
    else:
        yield float(value)
