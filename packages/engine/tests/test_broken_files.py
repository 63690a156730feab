"""Damaged checkpoints and caches: one line that names the file, or a new conversion."""

from __future__ import annotations

import json
import resource
import shutil
import signal
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from trencadis.engine.errors import ModelError
from trencadis.engine.front.tokenizer import Tokenizer
from trencadis.engine.models import gguf
from trencadis.engine.models.broken_files import reason_of
from trencadis.engine.models.loader import inspect_model, load_model

CONFIG = (
    *({"num_attention_heads": 0}, {"num_attention_heads": "x"}, {"num_hidden_layers": -1}),
    *({"vocab_size": "many"}, {"hidden_size": 47}, {"hidden_size": None}, {"eos_token_id": "x"}),
    *({"architectures": "LlamaForCausalLM"}, {"architectures": 5}, {"dtype": "float9"}),
    *({"max_position_embeddings": "many"}, {"layer_types": ["none", "none"]}),
)


def assert_one_line(directory: Path, match: str) -> None:
    with pytest.raises(ModelError, match=match) as caught:
        spec = inspect_model(str(directory))
        load_model(spec, torch.device("cpu"), torch.float32, 64)
        Tokenizer.load(str(directory))
    assert len(str(caught.value).splitlines()) == 1
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    ("text", "reason"),
    [("a\n  b", "a b"), ("", "ValueError"), ("x" * 300, "x" * 300), ("x" * 301, "x" * 299 + "…")],
    ids=["two lines", "nothing", "short", "long"],
)
def test_the_reason_is_one_line_of_300_characters_at_most(text: str, reason: str) -> None:
    assert reason_of(ValueError(text)) == reason


@pytest.fixture
def copy(tiny_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "copy"))


@pytest.mark.parametrize("changes", CONFIG, ids=str)
def test_a_wrong_value_in_the_config_is_one_line(copy: Path, changes: dict[str, Any]) -> None:
    file = copy / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    assert_one_line(
        copy, next(iter(changes)) if "architectures" in changes else "config.json|cannot"
    )


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("config.json", "config.json of .* cannot be used"),
        ("model.safetensors", "cannot be loaded"),
        ("tokenizer.json", "no usable tokenizer"),
        ("tokenizer_config.json", "no usable tokenizer"),
    ],
)
@pytest.mark.parametrize("content", [b"", b"5", b"[]", b'{"a', b"\xff\xfe\x00"])
def test_a_damaged_file_is_one_line(copy: Path, name: str, match: str, content: bytes) -> None:
    (copy / name).write_bytes(content)
    assert_one_line(copy, match)


@pytest.mark.parametrize("model_type", ["qwen2", "gemma", "gpt2"])
def test_a_checkpoint_without_tokenizer_files_is_refused(tmp_path: Path, model_type: str) -> None:
    """transformers makes a tokenizer of special tokens: every text was the client's fault."""
    AutoConfig.for_model(model_type).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"its vocabulary is empty.* Save tokenizer\.json there"):
        Tokenizer.load(str(tmp_path))


def test_weights_that_were_cut_are_one_line(copy: Path) -> None:
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert_one_line(copy, "cannot be loaded")


@pytest.mark.parametrize("content", ["[]", '{"a', "5"])
def test_a_damaged_generation_config_is_ignored_with_a_warning(
    copy: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    (copy / "generation_config.json").write_text(content)
    assert inspect_model(str(copy)).eos_token_ids == {257}
    assert "generation_config.json is ignored" in caplog.text


def test_an_end_of_sequence_that_is_no_token_is_one_line(copy: Path) -> None:
    (copy / "generation_config.json").write_text('{"eos_token_id": "x"}')
    assert_one_line(copy, "eos_token_id")


def gguf_text(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def gguf_header(**sizes: int) -> bytes:
    """A GGUF file of a Llama without tensors and tokenizer: version, counts, metadata."""
    architecture = gguf_text("general.architecture") + struct.pack("<I", 8) + gguf_text("llama")
    numbers = [
        gguf_text(f"llama.{name.replace('__', '.')}") + struct.pack("<II", 4, value)
        for name, value in sizes.items()
    ]
    header = b"GGUF" + struct.pack("<IQQ", 3, 0, 1 + len(numbers))
    return b"".join([header, architecture, *numbers])


WITHOUT_TENSORS = gguf_header(
    **{"block_count": 1, "embedding_length": 32, "feed_forward_length": 32, "context_length": 64},
    attention__head_count=2,
)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is not a GGUF file, which begins with GGUF"),
        (b'{"model_type": "llama"}', "is not a GGUF file, which begins with GGUF"),
        (b"GGUF", "cannot be read as a GGUF model: .*download it again"),
        (WITHOUT_TENSORS[:-6], "cannot be read as a GGUF model: .*download it again"),
        (WITHOUT_TENSORS, r"lacks \d+ weights of its model, such as \w+"),
    ],
    ids=["empty", "a config", "its beginning", "cut off", "no weights"],
)
def test_a_broken_gguf_is_called_one(tmp_path: Path, content: bytes, reason: str) -> None:
    if content.startswith(b"GGUF"):
        pytest.importorskip("gguf")
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    with pytest.raises(ModelError, match=reason) as refusal:
        gguf.convert_gguf(file, cache=tmp_path / "cache")
    assert "\n" not in str(refusal.value)
    assert not any((tmp_path / "cache").glob("*")), "nothing is kept of it"


class TestConversion:
    """Of a GGUF file, whose conversion copies the tiny model."""

    @pytest.fixture(autouse=True)
    def _conversion(self, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def convert(_: Path, target: Path) -> None:
            for file in tiny_model.iterdir():
                (target / file.name).write_bytes(file.read_bytes())

        monkeypatch.setattr(gguf, "_convert", convert)

    @pytest.fixture
    def source(self, tmp_path: Path) -> Path:
        source = tmp_path / "model.gguf"
        source.write_bytes(b"GGUF")
        return source

    @pytest.mark.parametrize(
        ("name", "damage"),
        [
            ("model.safetensors", lambda content: content[:-100]),
            ("model.safetensors", lambda content: content[:4]),
            ("model.safetensors", lambda _: b"x" * 1000),
            ("config.json", lambda _: b""),
        ],
    )
    def test_a_damaged_conversion_is_made_again(
        self, source: Path, tmp_path: Path, name: str, damage: Callable[[bytes], bytes]
    ) -> None:
        file = gguf.convert_gguf(source, cache=tmp_path / "cache") / name
        whole = file.read_bytes()
        file.write_bytes(damage(whole))
        assert gguf.convert_gguf(source, cache=tmp_path / "cache") / name == file
        assert file.read_bytes() == whole

    def test_a_whole_conversion_is_used(self, source: Path, tmp_path: Path) -> None:
        file = gguf.convert_gguf(source, cache=tmp_path / "cache") / "mark"
        file.write_text("kept")
        gguf.convert_gguf(source, cache=tmp_path / "cache")
        assert file.exists()

    def test_a_full_disk_is_one_line_with_the_remedy(self, source: Path, tmp_path: Path) -> None:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        usual = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        try:
            with pytest.raises(ModelError, match=r"free space there.*XDG_CACHE_HOME"):
                gguf.convert_gguf(source, cache=tmp_path / "cache")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, usual)
        assert list((tmp_path / "cache").iterdir()) == []

    def test_a_cache_that_cannot_be_made_is_one_line_with_the_remedy(
        self, source: Path, tmp_path: Path
    ) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(ModelError, match="XDG_CACHE_HOME"):
            gguf.convert_gguf(source, cache=tmp_path / "file" / "cache")
