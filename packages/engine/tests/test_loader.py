"""What can be served is loaded; what cannot is rejected in one line that says why."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertForMaskedLM, T5Config, T5ForConditionalGeneration

from trencadis.engine.devices import DEVICES, CPUDevice
from trencadis.engine.errors import ModelError
from trencadis.engine.models import gguf
from trencadis.engine.models.layer_reading import check_layers
from trencadis.engine.models.layer_spec import LayerSpec, feature_beyond
from trencadis.engine.models.loader import inspect_model, load_model, resolve_dtype
from trencadis.engine.settings.engine_config import EngineConfig

CPU = torch.device("cpu")


def load(directory: Path) -> torch.nn.Module:
    return load_model(inspect_model(str(directory)), CPU, torch.float32, 128)


def test_checkpoint_is_described(tiny_model: Path) -> None:
    spec = inspect_model(str(tiny_model))
    layer = LayerSpec(heads=6, kv_heads=2, key_width=16, value_width=16, scale=0.25)
    assert spec.layers == (layer, layer)
    assert (spec.vocab_size, spec.max_position_embeddings) == (258, 256)
    assert spec.eos_token_ids == {257}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("/no/such/directory", "no directory /no/such/directory"),
        ("./missing", "no directory"),
        ("a/b/c", "no directory"),
    ],
)
def test_wrong_path_is_one_clear_line(name: str, reason: str) -> None:
    with pytest.raises(ModelError, match=reason) as caught:
        inspect_model(name)
    assert "\n" not in str(caught.value)


def test_hub_id_out_of_reach_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="nobody/nothing is neither") as caught:
        inspect_model("nobody/nothing")
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_a_hub_that_does_not_answer_is_one_line_without_retries(tmp_path: Path) -> None:
    """Each file was tried for half a minute, in two processes, with a line for each try."""
    environ = {
        **os.environ,
        **{"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1"},
        "HF_HUB_CACHE": str(tmp_path),
    }
    code = (
        "import asyncio, sys\n"
        "from trencadis.engine import AsyncEngine, EngineConfig, ModelError\n"
        "try:\n"
        "    asyncio.run(AsyncEngine.start(EngineConfig(model='nobody/nothing')))\n"
        "except ModelError as error:\n"
        "    sys.exit(str(error))\n"
    )
    command = [sys.executable, "-c", code]
    ran = subprocess.run(
        command, check=False, env=environ, capture_output=True, text=True, timeout=300
    )
    assert "http://127.0.0.1:9 does not answer (" in ran.stderr
    assert ran.stderr.startswith("nobody/nothing is neither a local checkpoint nor a hub id that")
    assert ran.stderr.count("\n") == 1


def test_directory_without_config_and_plain_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"holds no config\.json"):
        inspect_model(str(tmp_path))
    file = tmp_path / "weights.bin"
    file.write_bytes(b"x")
    with pytest.raises(ModelError, match="is a file"):
        inspect_model(str(file))


def test_encoders_are_refused(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    BertForMaskedLM(BertConfig(**sizes, intermediate_size=16, vocab_size=50)).save_pretrained(
        tmp_path / "bert"
    )
    T5ForConditionalGeneration(
        T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=50)
    ).save_pretrained(tmp_path / "t5")
    for name in ("bert", "t5"):
        with pytest.raises(ModelError, match="not a decoder-only language model"):
            inspect_model(str(tmp_path / name))


def test_missing_weights_are_named(tmp_path: Path, make_tiny_model: Callable[..., Path]) -> None:
    make_tiny_model(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks weights: model\.layers\.1\.mlp\.up_proj\.weight"):
        load(tmp_path)


def test_absent_weight_file_is_one_clear_line(
    tmp_path: Path, make_tiny_model: Callable[..., Path]
) -> None:
    make_tiny_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="cannot be loaded") as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_window_is_refused_by_a_device_without_unless_it_is_never_left(
    tmp_path: Path, make_tiny_model: Callable[..., Path]
) -> None:
    make_tiny_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config.update(sliding_window=64, layer_types=["full_attention", "sliding_attention"])
    (tmp_path / "config.json").write_text(json.dumps(config))
    layers = inspect_model(str(tmp_path)).layers
    assert [layer.window for layer in layers] == [None, 64]
    with pytest.raises(ModelError, match=r"layer 1 attends within a window of 64.* max_model_len"):
        check_layers([layer.within(65) for layer in layers], feature_beyond, "it")
    check_layers([layer.within(64) for layer in layers], feature_beyond, "it")
    check_layers(layers, CPUDevice().supports, "it")


def test_bf16_weights_are_packed_and_compute_the_same(tiny_model: Path) -> None:
    from trencadis.engine.devices.cpu.onednn_linear import OneDNNLinear, onednn_packs_bf16
    from trencadis.engine.devices.cpu.tiled_linear import TiledLinear

    model = load_model(inspect_model(str(tiny_model)), CPU, torch.bfloat16, 128)
    CPUDevice().optimize(model)
    packed = [
        module for module in model.modules() if isinstance(module, (OneDNNLinear, TiledLinear))
    ]
    assert len(packed) == 2 * 7 + 1
    if not onednn_packs_bf16():
        return
    plain = torch.nn.Linear(40, 24, dtype=torch.bfloat16)
    rows = torch.randn(5, 40, dtype=torch.bfloat16)
    torch.testing.assert_close(OneDNNLinear(plain)(rows), plain(rows), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(
    ("stored", "served"),
    [("bfloat16", "bfloat16"), ("float16", "float16"), ("float32", "bfloat16")],
)
def test_dtype_auto_is_what_the_help_says(
    tiny_model: Path, tmp_path: Path, stored: str, served: str
) -> None:
    directory = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "dtype": stored}))
    spec = inspect_model(str(directory))
    words = attrs.fields(EngineConfig).dtype.metadata["default"]
    assert words == "auto: the checkpoint's if bf16 or fp16, else the device's, which is bf16"
    assert {device.preferred_dtype for device in DEVICES.values()} == {torch.bfloat16}
    assert resolve_dtype("auto", spec, CPUDevice.preferred_dtype) is getattr(torch, served)
    assert resolve_dtype("float32", spec, CPUDevice.preferred_dtype) is torch.float32


class TestConversion:
    """The GGUF conversion appears whole or not at all."""

    @pytest.fixture
    def source(self, tmp_path: Path) -> Path:
        path = tmp_path / "model.gguf"
        path.write_bytes(b"GGUF and more")
        return path

    def test_second_call_uses_the_first_ones_result(
        self, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calls = []
        monkeypatch.setattr(gguf, "_convert", lambda _, target: calls.append(_touch(target)))
        first = gguf.convert_gguf(source, cache=tmp_path / "cache")
        assert gguf.convert_gguf(source, cache=tmp_path / "cache") == first
        assert len(calls) == 1
        assert (first / "config.json").exists()

    def test_failure_half_way_leaves_nothing(
        self, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(_: Path, target: Path) -> None:
            _touch(target)
            raise KeyboardInterrupt

        monkeypatch.setattr(gguf, "_convert", fail)
        with pytest.raises(KeyboardInterrupt):
            gguf.convert_gguf(source, cache=tmp_path / "cache")
        assert list((tmp_path / "cache").iterdir()) == []

    def test_killed_conversion_is_not_mistaken_for_a_finished_one(
        self, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        cache = tmp_path / "cache"
        context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")

        def hang(_: Path, target: Path) -> None:
            _touch(target)
            multiprocessing.Event().wait(60)

        with monkeypatch.context() as patch:
            patch.setattr(gguf, "_convert", hang)
            process = context.Process(target=gguf.convert_gguf, args=(source, None, cache))
            process.start()
            while not list(cache.glob(".*/config.json")):
                assert process.is_alive()
            process.kill()
            process.join(10)
        monkeypatch.setattr(gguf, "_convert", lambda _, target: _touch(target, "whole"))
        assert (gguf.convert_gguf(source, cache=cache) / "config.json").read_text() == "whole"

    def test_of_two_at_once_both_end_with_the_same_result(
        self, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        cache = tmp_path / "cache"

        def overtaken(_: Path, target: Path) -> None:
            _touch(target, "second")
            with monkeypatch.context() as patch:
                patch.setattr(gguf, "_convert", lambda _, other: _touch(other, "first"))
                gguf.convert_gguf(source, cache=cache)

        monkeypatch.setattr(gguf, "_convert", overtaken)
        target = gguf.convert_gguf(source, cache=cache)
        assert (target / "config.json").read_text() == "first"
        assert list(cache.iterdir()) == [target]

    def test_other_file_of_the_same_name_is_converted_anew(
        self, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(gguf, "_convert", lambda _, target: _touch(target))
        first = gguf.convert_gguf(source, cache=tmp_path / "cache")
        source.write_bytes(b"GGUF, retrained")
        assert gguf.convert_gguf(source, cache=tmp_path / "cache") != first

    def test_other_weights_in_place_are_converted_anew(
        self, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Size, first MiB and time of the last change stay."""
        monkeypatch.setattr(gguf, "_convert", lambda _, target: _touch(target))
        source.write_bytes(b"GGUF" + bytes(2 << 20) + b"old")
        times = source.stat()
        first = gguf.convert_gguf(source, cache=tmp_path / "cache")
        source.write_bytes(b"GGUF" + bytes(2 << 20) + b"new")
        os.utime(source, ns=(times.st_atime_ns, times.st_mtime_ns))
        assert gguf.convert_gguf(source, cache=tmp_path / "cache") != first

    def test_the_cache_is_for_its_owner_alone(
        self, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(gguf, "_convert", lambda _, target: _touch(target))
        gguf.convert_gguf(source, cache=tmp_path / "cache")
        assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700

    def test_file_that_is_no_gguf_is_refused(self, source: Path, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match="cannot be read as a GGUF model"):
            gguf.convert_gguf(source, cache=tmp_path / "cache")
        shutil.rmtree(tmp_path / "cache")


def _touch(target: Path, content: str = "{}") -> None:
    (target / "config.json").write_text(content)
