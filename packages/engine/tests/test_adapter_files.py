"""Adapters are read as PEFT saves them, and checked before they are used."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import ALL_LINEAR, SETTINGS, pair, save_adapter, write_adapter

from trencadis.engine import AdapterError
from trencadis.engine.models.adapter_files import LayerShape, read_adapter

LAYER, OTHER = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"
LAYERS = {LAYER: LayerShape(48, 96), OTHER: LayerShape(64, 48)}
A, B = f"base_model.model.{LAYER}.lora_A.weight", f"base_model.model.{LAYER}.lora_B.weight"
GOOD = pair(LAYER, 48, 96)

Write = Callable[[Path], object]


def read(
    directory: Path,
    max_rank: int = 8,
    dtype: torch.dtype = torch.float32,
    within: Sequence[str] = (),
) -> Any:
    return read_adapter(directory, LAYERS, max_rank, dtype, within)


def test_what_peft_has_saved_is_read(tiny_model: Path, tmp_path: Path) -> None:
    shapes = {
        f"model.layers.{number}.{part}.{name}": LayerShape(*shape)
        for number in range(2)
        for part, name, *shape in (
            *(("self_attn", "q_proj", 48, 96), ("self_attn", "k_proj", 48, 32)),
            *(("self_attn", "v_proj", 48, 32), ("self_attn", "o_proj", 96, 48)),
            *(("mlp", "gate_proj", 48, 64), ("mlp", "up_proj", 48, 64)),
            ("mlp", "down_proj", 64, 48),
        )
    }
    directory = save_adapter(tiny_model, tmp_path / "a", rank=5)
    adapter = read_adapter(directory, shapes, 8, torch.float32)
    assert adapter.rank == 5
    assert sorted(adapter.layers) == sorted(shapes)
    assert len(shapes) == 2 * len(ALL_LINEAR)
    for name, shape in shapes.items():
        assert adapter.layers[name].down.shape == (5, shape.inputs)
        assert adapter.layers[name].up.shape == (5, shape.outputs)
    numbers = 4 * 5 * sum(map(sum, shapes.values()))
    assert adapter.num_bytes == numbers


@pytest.mark.parametrize(("use_rslora", "scale"), [(False, 8 / 4), (True, 8 / math.sqrt(4))])
def test_the_scale_is_that_of_peft(tmp_path: Path, use_rslora: bool, scale: float) -> None:
    write_adapter(tmp_path, GOOD, {**SETTINGS, "use_rslora": use_rslora})
    found = read(tmp_path).layers[LAYER]
    assert torch.equal(found.down, GOOD[A])
    torch.testing.assert_close(found.up, GOOD[B].t() * scale)


def test_the_digest_is_that_of_what_is_computed(tmp_path: Path) -> None:
    first = read(write_adapter(tmp_path / "a", GOOD)).digest
    assert first == read(write_adapter(tmp_path / "b", GOOD)).digest
    changed = {**GOOD, B: GOOD[B] + 1}
    assert first != read(write_adapter(tmp_path / "c", changed)).digest
    scaled = {**SETTINGS, "lora_alpha": 9}
    assert first != read(write_adapter(tmp_path / "d", GOOD, scaled)).digest


def test_other_dtypes_are_converted(tmp_path: Path) -> None:
    halves = {name: tensor.bfloat16() for name, tensor in GOOD.items()}
    assert read(write_adapter(tmp_path, halves)).layers[LAYER].up.dtype is torch.float32
    assert read(tmp_path, dtype=torch.bfloat16).layers[LAYER].down.dtype is torch.bfloat16


# Where the files are when they are opened.


def test_files_are_below_a_directory_wherever_links_lead(tmp_path: Path) -> None:
    inside = write_adapter(tmp_path / "allowed/a", GOOD)
    outside = write_adapter(tmp_path / "other/b", GOOD)
    within = [str(tmp_path / "empty"), str(tmp_path / "allowed")]
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        for place, files in (("elsewhere", outside), ("here", inside)):
            link = write_adapter(tmp_path / f"allowed/{place}-{name}", GOOD) / name
            link.unlink()
            link.symlink_to(files / name)
        assert read(link.parent, within=within).rank == 4
        with pytest.raises(AdapterError, match=rf"elsewhere-{name}/{name} .* not below"):
            read(tmp_path / f"allowed/elsewhere-{name}", within=within)
    (tmp_path / "allowed/link").symlink_to(outside)
    for directory in (outside, tmp_path / "allowed/link"):
        with pytest.raises(AdapterError, match="not below a directory"):
            read(directory, within=within)
        assert read(directory).rank == 4


@pytest.mark.parametrize("first", ["allowed/a", "other/b"])
def test_a_link_that_changes_while_it_is_read_leads_nowhere_else(
    first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leads to one of two places when a file is opened, and to the other one right after."""
    places = [write_adapter(tmp_path / name, GOOD) for name in ("allowed/a", "other/b")]
    link, fstat = tmp_path / "allowed/link", os.fstat

    def exchange(number: int) -> os.stat_result:
        (other,) = {*places} - {link.readlink()}
        link.unlink()
        link.symlink_to(other)
        return fstat(number)

    link.symlink_to(tmp_path / first)
    monkeypatch.setattr(os, "fstat", exchange)
    with pytest.raises(AdapterError, match="not below a directory"):
        read(link, within=[str(tmp_path / "allowed")])
    assert link.readlink() != tmp_path / first, "the first file was refused"


# Files that nobody's tool saves, or that are of a kind that is not served.


def settings(**changes: object) -> Write:
    return lambda directory: write_adapter(directory, GOOD, {**SETTINGS, **changes})


def tensors(**changes: object) -> Write:
    """``A`` and ``B`` in place of those of `GOOD`; others by name, None for none."""
    names = {"A": A, "B": B}
    changed = {names.get(name, name): tensor for name, tensor in changes.items()}
    return lambda directory: write_adapter(
        directory, {k: v for k, v in {**GOOD, **changed}.items() if v is not None}
    )


def config_bytes(content: bytes) -> Write:
    def write(directory: Path) -> None:
        write_adapter(directory, GOOD)
        (directory / "adapter_config.json").write_bytes(content)

    return write


def weight_bytes(change: Callable[[bytes], bytes]) -> Write:
    def write(directory: Path) -> None:
        file = write_adapter(directory, GOOD) / "adapter_model.safetensors"
        file.write_bytes(change(file.read_bytes()))

    return write


def header(change: Callable[[dict[str, Any]], object]) -> Write:
    """The header of the weights after ``change``, with the same content."""

    def changed(content: bytes) -> bytes:
        end = 8 + int.from_bytes(content[:8], "little")
        entries = json.loads(content[8:end])
        change(entries)
        text = json.dumps(entries).encode()
        return len(text).to_bytes(8, "little") + text + content[end:]

    return weight_bytes(changed)


def at(tensor: torch.Tensor, value: float) -> torch.Tensor:
    changed = tensor.clone()
    changed[1, 2] = value
    return changed


def without(name: str) -> Write:
    return lambda directory: (write_adapter(directory, GOOD) / name).unlink()


def replaced_by_pipe(directory: Path) -> None:
    file = write_adapter(directory, GOOD) / "adapter_model.safetensors"
    file.unlink()
    os.mkfifo(file)


def replaced_by_directory(directory: Path) -> None:
    file = write_adapter(directory, GOOD) / "adapter_model.safetensors"
    file.unlink()
    file.mkdir()


def with_pickle_alone(directory: Path) -> None:
    write_adapter(directory, GOOD)
    (directory / "adapter_model.safetensors").unlink()
    torch.save(GOOD, directory / "adapter_model.bin")


class Planted:
    def __reduce__(self) -> Any:
        return os.system, ("exit 1",)


def with_pickle_inside(directory: Path) -> None:
    file = write_adapter(directory, GOOD) / "adapter_model.safetensors"
    torch.save({"w": GOOD[A]}, file)


HOSTILE: dict[str, tuple[Write, str]] = {
    "no directory": (lambda directory: None, "adapter_config.json cannot be read"),
    "no config": (without("adapter_config.json"), "adapter_config.json cannot be read"),
    "no weights": (without("adapter_model.safetensors"), "safetensors cannot be read"),
    "a pickle alone": (with_pickle_alone, "safetensors cannot be read"),
    "a pickle under the name": (with_pickle_inside, "safetensors cannot be read"),
    "a pipe": (replaced_by_pipe, "it is not a file"),
    "a directory": (replaced_by_directory, "cannot be read"),
    "a long config": (config_bytes(b" " * (1 << 20) + b"{}"), "at most"),
    "long weights": (weight_bytes(lambda content: content + bytes(32 << 20)), "at most"),
    **{
        f"config {content[:20]!r}": (config_bytes(content), reason)
        for content, reason in {
            b"": "is not JSON",
            b"{": "is not JSON",
            b"\xff\xfe\x00": "is not JSON",
            b"[" * 100_000: "is not JSON",
            b"nul": "is not JSON",
            b"null": "instead of settings",
            b"[]": "instead of settings",
            b'"LORA"': "instead of settings",
            b"7": "instead of settings",
            b"{}": "of the type None",
            b'{"peft_type": {}}': "of the type",
            b'{"r": 4, "r": 5}': "of the type None",
        }.items()
    },
    **{
        f"{name} {value!r}"[:60]: (settings(**{name: value}), reason)
        for name, value, reason in (
            *(("peft_type", kind, "of the type") for kind in ("IA3", "LOHA", "ADALORA", "lora", 1)),
            *(("peft_type", kind, "of the type") for kind in (None, ["LORA"], "PREFIX_TUNING")),
            *(("bias", bias, "has the bias") for bias in ("all", "lora_only", True, 1, [], {})),
            *(("r", rank, "instead of a rank") for rank in (0, -1, 4.0, "4", None, True, [4], 1e9)),
            *(("r", rank, "above max_lora_rank 8") for rank in (9, 64, 2**63, 10**30)),
            *(("r", rank, "of the shape") for rank in (1, 3, 5, 8)),
            *(
                ("lora_alpha", alpha, "instead of a number")
                for alpha in ("8", None, True, [8], math.nan, math.inf, -math.inf, 10**400, 1e39)
            ),
            *(("use_rslora", value, "use_rslora") for value in ("yes", 1, [], 0.5)),
            *(
                ("init_lora_weights", kind, "changes the model's own weights")
                for kind in ("pissa", "pissa_niter_4", "olora", "loftq", "corda", "lora_ga", 2, [])
            ),
            ("use_dora", True, "DoRA"),
            ("use_dora", 1, "DoRA"),
            ("modules_to_save", ["embed_tokens"], "embeddings"),
            ("modules_to_save", "lm_head", "embeddings"),
            ("trainable_token_indices", [1], "embeddings"),
            ("trainable_token_indices", {"embed_tokens": [1]}, "embeddings"),
            ("target_parameters", ["mlp.experts.gate_up_proj"], "not linear layers"),
            ("rank_pattern", {"q_proj": 2}, "several ranks"),
            ("alpha_pattern", {"q_proj": 2}, "several scales"),
            ("layer_replication", [[0, 1]], "repeats layers"),
            ("lora_bias", True, "biases"),
            ("fan_in_fan_out", True, "transposed"),
            ("alora_invocation_tokens", [1], "certain tokens"),
            *(
                (name, {"x": 1}, "not known here")
                for name in ("use_qalora", "arrow_config", "kasa_config", "use_bdlora")
            ),
            *(
                (name, {"x": 1}, "not known here")
                for name in (
                    "velora_config",
                    "monteclora_config",
                    "megatron_config",
                    "corda_config",
                )
            ),
            ("a setting of tomorrow", 1, "not known here"),
            ("x" * 10_000, "y" * 10_000, "not known here"),
        )
    },
    "only A": (tensors(B=None), f"lacks {B}"),
    "only B": (tensors(A=None), f"lacks {A}"),
    "nothing": (tensors(A=None, B=None), "has no matrices"),
    **{
        f"tensor {name}"[:60]: (tensors(**{name: torch.ones(4, 48)}), reason)
        for name, reason in {
            "base_model.model.lm_head.lora_A.weight": "no such linear layer",
            "base_model.model.model.embed_tokens.lora_A.weight": "no such linear layer",
            "base_model.model.model.embed_tokens.lora_embedding_A": "not a matrix of LoRA",
            "base_model.model.model.layers.0.mlp.gate.lora_A.weight": "no such linear layer",
            "base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight": "no such linear",
            f"base_model.model.{LAYER}.lora_magnitude_vector": "not a matrix of LoRA",
            f"base_model.model.{LAYER}.lora_B.bias": "not a matrix of LoRA",
            f"base_model.model.{LAYER}.base_layer.weight": "not a matrix of LoRA",
            f"base_model.model.{LAYER}.lora_A.default.weight": "not a matrix of LoRA",
            f"base_model.model.{LAYER}.lora_A.weight.lora_B.weight": "no such linear layer",
            f"base_model.model.{LAYER}": "not a matrix of LoRA",
            f"base_model.{LAYER}.lora_A.weight": "no such linear layer",
            f"{LAYER}.lora_A.weight": "not a matrix of LoRA",
            "base_model.model..lora_A.weight": "no such linear layer",
            "base_model.model.lora_A.weight": "not a matrix of LoRA",
            ".lora_A.weight": "not a matrix of LoRA",
            "weight": "not a matrix of LoRA",
            "": "not a matrix of LoRA",
            "../../etc/passwd": "not a matrix of LoRA",
            "x" * 5000: "not a matrix of LoRA",
        }.items()
    },
    **{
        f"A of the shape {shape}": (tensors(A=torch.ones(shape)), "of the shape")
        for shape in ((), (4,), (48, 4), (4, 47), (4, 49), (3, 48), (5, 48), (1, 4, 48), (0, 48))
    },
    **{
        f"B of the shape {shape}": (tensors(B=torch.ones(shape)), "of the shape")
        for shape in ((4, 96), (96, 3), (96, 5), (95, 4), (96, 4, 1), (96,), (96, 0))
    },
    **{
        f"A of {dtype}": (tensors(A=torch.ones(4, 48).to(dtype)), "save it in float32")
        for dtype in (torch.float64, torch.int8, torch.int64, torch.uint8, torch.bool)
    },
    "A of FP8": (tensors(A=torch.ones(4, 48).to(torch.float8_e4m3fn)), "save it in float32"),
    **{
        f"{which} with {value}": (tensors(**{which: at(GOOD[name], value)}), "not finite")
        for which, name in (("A", A), ("B", B))
        for value in (math.nan, math.inf, -math.inf)
    },
    "B that the scale makes infinite": (tensors(B=at(GOOD[B], 3e38)), "not finite"),
    "no content": (weight_bytes(lambda content: b""), "cannot be read"),
    "seven bytes": (weight_bytes(lambda content: content[:7]), "cannot be read"),
    "a header alone": (weight_bytes(lambda content: content[:200]), "cannot be read"),
    "cut off": (weight_bytes(lambda content: content[:-1]), "cannot be read"),
    "a byte more": (weight_bytes(lambda content: content + b"x"), "cannot be read"),
    "a header of 2**63 bytes": (
        weight_bytes(lambda content: (2**63).to_bytes(8, "little") + content[8:]),
        "cannot be read",
    ),
    "zeros": (weight_bytes(lambda content: bytes(len(content))), "cannot be read"),
    "text": (weight_bytes(lambda content: b"not a file of tensors" * 40), "cannot be read"),
    **{
        f"the first {count} bytes": (
            weight_bytes(lambda content, count=count: content[:count]),
            "cannot be read",
        )
        for count in (1, 8, 9, 16, 64, 100, 250, 400, 1000)
    },
    **{
        f"a header of {length} bytes": (
            weight_bytes(lambda content, n=length: n.to_bytes(8, "little") + content[8:]),
            "cannot be read",
        )
        for length in (0, 1, 7, 2**16, 2**32, 2**62, 2**64 - 1)
    },
    **{
        f"an entry with {field} {value!r}": (
            header(lambda h, field=field, value=value: h[A].update({field: value})),
            "cannot be read",
        )
        for field, values in {
            "dtype": ("", "f32", "F64", "BF16", None, 3, ["F32"]),
            "shape": (None, "4x48", 4, [4], [4, 48, 2], [[4, 48]], {"0": 4}),
            "data_offsets": (None, [], [0], 0, "0", [1, 769], [0, 767], [-1, 767]),
        }.items()
        for value in values
    },
    **{
        f"an entry that is {value!r}": (
            header(lambda h, value=value: h.update({A: value})),
            "cannot be read",
        )
        for value in (None, 3, [], "F32", {})
    },
    **{
        f"metadata {value!r}": (
            header(lambda h, value=value: h.update({"__metadata__": value})),
            "cannot be read",
        )
        for value in (3, [], "x", {"a": 1}, {"a": {}})
    },
    "an unknown dtype": (header(lambda h: h[A].update(dtype="F7")), "cannot be read"),
    "a negative shape": (header(lambda h: h[A].update(shape=[-4, -48])), "cannot be read"),
    "a huge shape": (header(lambda h: h[A].update(shape=[2**40, 2**40])), "cannot be read"),
    "a shape of fractions": (header(lambda h: h[A].update(shape=[4.5, 48])), "cannot be read"),
    "offsets past the end": (
        header(lambda h: h[A].update(data_offsets=[0, 2**40])),
        "cannot be read",
    ),
    "offsets backwards": (header(lambda h: h[A].update(data_offsets=[768, 0])), "cannot be read"),
    "overlapping offsets": (
        header(lambda h: h[B].update(data_offsets=h[A]["data_offsets"])),
        "cannot be read",
    ),
    "no offsets": (header(lambda h: h[A].pop("data_offsets")), "cannot be read"),
    "a header that is a list": (
        weight_bytes(lambda content: (2).to_bytes(8, "little") + b"[]" + content),
        "cannot be read",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_adapter_is_refused_by_the_name_of_its_file(name: str, tmp_path: Path) -> None:
    write, reason = HOSTILE[name]
    directory = tmp_path / "hostile"
    write(directory)
    with pytest.raises(AdapterError) as caught:
        read(directory)
    message = str(caught.value)
    assert str(directory) in message
    assert reason in message, message
    assert "\n" not in message
    assert len(message) < 1200


def test_there_are_enough_of_them() -> None:
    assert len(HOSTILE) >= 200


def test_what_is_too_large_for_half_precision_is_refused(tmp_path: Path) -> None:
    write_adapter(tmp_path, {**GOOD, A: at(GOOD[A], 1e6)})
    read(tmp_path)
    with pytest.raises(AdapterError, match="not finite in float16"):
        read(tmp_path, dtype=torch.float16)
