"""Requests with adapters get the tokens that PEFT computes, whatever else is in their batches."""

from __future__ import annotations

import contextlib
import itertools
import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
from adapters import Reference, save_adapter
from model_families import save_family
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from trencadis.engine import (
    LLM,
    AdapterError,
    ConfigError,
    EngineConfig,
    EngineCore,
    GenerateRequest,
    InvalidRequest,
    SamplingParams,
    default_model,
)
from trencadis.engine.core.adapter_slots import AdapterSlots
from trencadis.engine.core.config_payload import config_payload
from trencadis.engine.core.reconfigure import ModelSwitcher
from trencadis.engine.models import adapter_operator

RANKS = (4, 8, 16, 64, 5, 32, 4, 1)
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def adapters(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Eight random adapters, some for a few layers, one with rsLoRA."""
    folder = tmp_path_factory.mktemp("adapters")
    targets = itertools.cycle((None, ("q_proj", "v_proj"), ("gate_proj", "down_proj")))
    found = {}
    for number, (rank, which) in enumerate(zip(RANKS, targets, strict=False)):
        name = f"adapter-{number}"
        changed = {} if which is None else {"targets": which}
        found[name] = save_adapter(
            tiny_model,
            folder / name,
            rank=rank,
            seed=number,
            size=1 / rank**0.5,
            use_rslora=number == 2,
            **changed,
        )
    return found


@pytest.fixture(scope="module")
def reference(tiny_model: Path, adapters: Mapping[str, Path]) -> Reference:
    return Reference(tiny_model, adapters)


def config(model: Path, adapters: Mapping[str, Path], **settings: object) -> EngineConfig:
    values = {
        "model": model,
        "dtype": "float32",
        "device": "cpu",
        "block_size": 8,
        "max_model_len": 96,
        "enable_lora": True,
        "max_loras": 8,
        "max_lora_rank": 64,
        "warmup": "none",
        "lora_modules": {name: str(path) for name, path in adapters.items()},
        **settings,
    }
    return EngineConfig(**values)


Start = Callable[[EngineConfig], EngineCore]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a core, which ends with the test."""
    with contextlib.ExitStack() as ends:

        def started(settings: EngineConfig) -> EngineCore:
            core = EngineCore(settings)
            ends.callback(core.close)
            core.warm_up()
            return core

        yield started


GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)


def prompts(count: int, seed: int = 1) -> list[tuple[int, ...]]:
    draw = random.Random(seed)
    return [tuple(draw.randrange(256) for _ in range(draw.randint(1, 40))) for _ in range(count)]


def serve(
    core: EngineCore, requests: Mapping[str, GenerateRequest], max_steps: int = 5000
) -> dict[str, list[int]]:
    """The tokens of each request, added at once."""
    found: dict[str, list[int]] = {key: [] for key in requests}
    for key, request in requests.items():
        core.add(key, request)
    for _ in range(max_steps):
        if not core.has_work:
            return found
        for token in core.step():
            found[token.key].append(token.token_id)
        assert not core.take_failures()
    raise AssertionError("requests are unfinished")


def test_alone_and_all_together(
    start: Start, tiny_model: Path, adapters: dict[str, Path], reference: Reference
) -> None:
    names = [*adapters, None]
    core = start(config(tiny_model, adapters))
    prompt = prompts(1)[0]
    expected = {name: reference.tokens(name, prompt, NUM_TOKENS) for name in names}
    assert len({tuple(tokens) for tokens in expected.values()}) == len(names), "they differ"
    for name in names:
        alone = serve(core, {"alone": GenerateRequest(prompt, GREEDY, lora=name)})
        assert alone["alone"] == expected[name], name
    together = {
        f"{number}": (name, prompt)
        for number, (name, prompt) in enumerate(
            zip(itertools.cycle(names), prompts(36), strict=False)
        )
    }
    found = serve(
        core,
        {
            key: GenerateRequest(prompt, GREEDY, lora=name)
            for key, (name, prompt) in together.items()
        },
    )
    for key, (name, prompt) in together.items():
        assert found[key] == reference.tokens(name, prompt, NUM_TOKENS), (key, name)


def test_requests_without_adapters_compute_nothing_for_them(
    start: Start, tiny_model: Path, adapters: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    core = start(config(tiny_model, adapters))

    def forbidden(*_: object) -> None:
        raise AssertionError("nothing needs this")

    monkeypatch.setattr("trencadis.engine.models.adapter_layers.AdapterLayers.rows_of", forbidden)
    plain = EngineCore(config(tiny_model, {}, enable_lora=False))
    requests = {f"{i}": GenerateRequest(p, GREEDY) for i, p in enumerate(prompts(6))}
    assert serve(core, requests) == serve(plain, requests)
    plain.close()


SCARCE = {
    "recomputed": {"num_blocks": 26, "num_host_blocks": 0},
    "swapped": {"num_blocks": 26, "num_host_blocks": 60},
    "in chunks": {"max_num_batched_tokens": 8, "max_num_seqs": 8},
    "in flight": {"async_scheduling": True},
    "without buckets": {"use_buckets": False},
    "without a shared prefix": {"enable_prefix_caching": False},
    "in sequence buckets": {"bucket_grid": "seq"},
    "few slots": {"max_loras": 2},
}


SLOW = {
    "in chunks",
    "without buckets",
    "without a shared prefix",
    "in sequence buckets",
    "few slots",
}


@pytest.mark.parametrize(
    "case", [pytest.param(x, marks=[pytest.mark.slow] if x in SLOW else []) for x in SCARCE]
)
def test_no_token_changes_where_requests_are_preempted_and_wait(
    case: str, tiny_model: Path, adapters: dict[str, Path], reference: Reference
) -> None:
    core = EngineCore(config(tiny_model, adapters, **{"max_num_seqs": 12, **SCARCE[case]}))
    if case == "swapped":
        core.scheduler.costs.prefill_s_per_token = 1.0
    core.warm_up()
    names = [*adapters, None]
    draw = random.Random(case)
    asked = {f"{i}": (draw.choice(names), prompt) for i, prompt in enumerate(prompts(40, seed=3))}
    found = serve(
        core,
        {key: GenerateRequest(prompt, GREEDY, lora=name) for key, (name, prompt) in asked.items()},
    )
    for key, (name, prompt) in asked.items():
        assert found[key] == reference.tokens(name, prompt, NUM_TOKENS), (key, name)
    stats = core.stats
    if case == "recomputed":
        assert stats.num_recomputes > 0
    if case == "swapped":
        assert stats.num_swaps > 0
    assert not core.scheduler.adapters
    core.close()


def test_prefixes_are_shared_with_the_same_adapter_alone(
    start: Start, tiny_model: Path, adapters: dict[str, Path], reference: Reference
) -> None:
    core = start(config(tiny_model, adapters))
    prompt = tuple(range(40, 80))
    cached: dict[str | None, list[int]] = {}
    for name in ("adapter-0", None, "adapter-1", "adapter-0", None, "adapter-1"):
        core.add("r", GenerateRequest(prompt, GREEDY, lora=name))
        tokens = []
        while core.has_work:
            tokens += core.step()
        cached.setdefault(name, []).append(tokens[0].num_cached_tokens)
        assert [t.token_id for t in tokens] == reference.tokens(name, prompt, NUM_TOKENS)
    assert cached == {"adapter-0": [0, 32], None: [0, 32], "adapter-1": [0, 32]}
    # A salt that looks like the content of an adapter opens nothing.
    digest = next(each.loaded.digest for each in core.adapters if each.name == "adapter-0")
    core.add("salted", GenerateRequest(prompt, GREEDY, cache_salt=digest))
    assert core.step()[0].num_cached_tokens == 0


def test_a_name_with_other_weights_shares_nothing_with_the_old_one(
    start: Start, tiny_model: Path, adapters: dict[str, Path], reference: Reference
) -> None:
    core = start(config(tiny_model, {}))
    prompt = tuple(range(40, 80))
    for content in ("adapter-0", "adapter-1", "adapter-0"):
        core.load_adapter("mine", str(adapters[content]))
        found = serve(core, {"r": GenerateRequest(prompt, GREEDY, lora="mine")})
        assert found["r"] == reference.tokens(content, prompt, NUM_TOKENS)
        core.unload_adapter("mine")


def test_a_resumed_request_has_the_weights_that_it_began_with(
    start: Start, tiny_model: Path, adapters: dict[str, Path]
) -> None:
    core = start(config(tiny_model, {}))
    core.load_adapter("mine", str(adapters["adapter-0"]))
    (first,) = (each.info.digest for each in core.adapters)
    resumed = GenerateRequest(
        (1, 2, 3), GREEDY, lora="mine", lora_digest=first, is_resumed=True, output_token_ids=(4,)
    )
    assert serve(core, {"r": resumed})["r"]
    core.unload_adapter("mine")
    core.load_adapter("mine", str(adapters["adapter-1"]))
    with pytest.raises(InvalidRequest, match="'mine' has other weights than when"):
        core.add("r", resumed)


def test_a_sample_that_ends_early_leaves_no_content_behind(
    start: Start, tiny_model: Path, adapters: dict[str, Path]
) -> None:
    core = start(config(tiny_model, {}))
    core.load_adapter("mine", str(adapters["adapter-0"]))
    core.add("r", GenerateRequest((1, 2, 3), GREEDY, lora="mine"))
    core.step()
    (digest,) = (each.loaded.digest for each in core.adapters)
    core.unload_adapter("mine")
    assert digest in core.executor.worker.adapters
    core.finish("r", 0)
    assert digest not in core.executor.worker.adapters


def test_content_that_a_model_in_the_stash_holds_is_dropped_when_it_returns(
    start: Start,
    tiny_model: Path,
    adapters: dict[str, Path],
    make_tiny_model: Callable[..., Path],
    tmp_path: Path,
) -> None:
    first = config(tiny_model, {}, served_model_name="first")
    second = config(make_tiny_model(tmp_path / "b"), {}, served_model_name="second")
    core = start(first)
    core.load_adapter("mine", str(adapters["adapter-0"]))
    core.add("r", GenerateRequest((1, 2, 3), GREEDY, lora="mine"))
    core.step()
    (digest,) = (each.loaded.digest for each in core.adapters)
    core.unload_adapter("mine")
    switcher = ModelSwitcher(core)
    for model in (second, first):
        switcher.reconfigure_engine(config_payload(model), 1 << 30)
    assert digest not in core.executor.worker.adapters


def test_a_later_core_has_what_models_had_and_not_what_their_settings_name(
    tiny_model: Path,
    adapters: dict[str, Path],
    reference: Reference,
    make_tiny_model: Callable[..., Path],
    tmp_path: Path,
) -> None:
    first = config(tiny_model, {"a": adapters["adapter-0"]}, served_model_name="first")
    second = config(make_tiny_model(tmp_path), {}, served_model_name="second")
    had = {"a": str(adapters["adapter-1"]), "gone": "/nowhere"}
    core = EngineCore(first, adapters={"first": {}, "second": had})
    assert not core.adapters
    core.warm_up()
    ModelSwitcher(core).reconfigure_engine(config_payload(second), 0)
    assert [each.name for each in core.adapters] == ["a"], "one that is lost stops nothing"
    found = serve(core, {"r": GenerateRequest((1, 2, 3), GREEDY, lora="a")})
    assert found["r"] == reference.tokens("adapter-1", (1, 2, 3), NUM_TOKENS)
    core.close()


@pytest.mark.parametrize("family", ["Llama 4 (text)", "OLMoE", "Qwen 3"])
def test_without_an_adapter_each_family_has_its_own_tokens(family: str, tmp_path: Path) -> None:
    """Also where a router is a linear layer that gives more than its product."""
    save_family(family, tmp_path)
    prompt = (3, 1, 4, 1, 5, 9, 2, 6)
    tokens = []
    for enabled in (False, True):
        settings = {"max_model_len": 32, "max_loras": 2, "max_lora_rank": 8}
        core = EngineCore(config(tmp_path, {}, enable_lora=enabled, **settings))
        core.warm_up()
        tokens.append(serve(core, {"r": GenerateRequest(prompt, GREEDY)}))
        if enabled:
            core.load_adapter(
                "mine", str(save_adapter(tmp_path, tmp_path / "a", targets=("q_proj",)))
            )
            assert serve(core, {"r": GenerateRequest(prompt, GREEDY, lora="mine")})["r"]
        core.close()
    assert tokens[0] == tokens[1]


def test_what_was_added_before_an_unload_goes_on(
    start: Start, tiny_model: Path, adapters: dict[str, Path], reference: Reference
) -> None:
    core = start(config(tiny_model, {}, max_loras=1, max_cpu_loras=2))
    prompt = prompts(1)[0]
    for name in ("adapter-0", "adapter-1"):
        core.load_adapter(name, str(adapters[name]))
        core.add(name, GenerateRequest(prompt, GREEDY, lora=name))
    tokens = core.step()
    store = core.executor.worker.adapters
    held = {each.name: each.loaded.digest for each in core.adapters}
    for name in held:
        core.unload_adapter(name)
    assert not core.adapters
    with pytest.raises(AdapterError, match="max_cpu_loras is 2"):
        core.load_adapter("adapter-2", str(adapters["adapter-2"]))
    with pytest.raises(AdapterError, match="'adapter-0' is not loaded"):
        core.add("late", GenerateRequest(prompt, GREEDY, lora="adapter-0"))
    while core.has_work:
        tokens += core.step()
    for name in held:
        got = [token.token_id for token in tokens if token.key == name]
        assert got == reference.tokens(name, prompt, NUM_TOKENS)
    assert not any(digest in store for digest in held.values()), "nothing is left behind"
    core.load_adapter("adapter-2", str(adapters["adapter-2"]))


def test_an_aborted_request_leaves_nothing_behind(
    start: Start, tiny_model: Path, adapters: dict[str, Path]
) -> None:
    core = start(config(tiny_model, {}))
    core.load_adapter("a", str(adapters["adapter-0"]))
    for num_steps in (0, 1, 3):
        core.add("r", GenerateRequest((1, 2, 3), GREEDY, lora="a"))
        for _ in range(num_steps):
            core.step()
        core.abort("r")
        assert not core.scheduler.adapters
    core.add("r", GenerateRequest((1, 2, 3), GREEDY, lora="a"))
    core.step()
    (held,) = core.adapters
    core.unload_adapter("a")
    assert core.executor.holds_adapter(held.loaded.digest)
    core.abort("r")
    assert not core.executor.holds_adapter(held.loaded.digest)


PARAMS = {
    "samples": SamplingParams(temperature=1.0, seed=7, n=3, max_tokens=8),
    "best_of": SamplingParams(temperature=1.0, seed=7, n=1, best_of=3, max_tokens=8),
    "beams": SamplingParams(temperature=0.0, n=3, use_beam_search=True, max_tokens=8),
    "penalties": SamplingParams(
        temperature=0.0, repetition_penalty=1.3, presence_penalty=0.5, max_tokens=8
    ),
    "prompt_logprobs": SamplingParams(temperature=0.0, prompt_logprobs=2, max_tokens=8),
}


@pytest.mark.parametrize("case", PARAMS)
def test_other_parameters_are_those_of_the_merged_model(
    case: str, tiny_model: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    PeftModel.from_pretrained(base, adapters["adapter-1"]).merge_and_unload().save_pretrained(
        tmp_path
    )
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path)
    settings = {"dtype": "float32", "device": "cpu", "max_model_len": 96, "warmup": "none"}
    merged = LLM(tmp_path, **settings)
    llm = LLM(tiny_model, enable_lora=True, max_lora_rank=8, **settings)
    llm.load_adapter("a", adapters["adapter-1"])
    asked = [list(prompt) for prompt in prompts(3)]
    expected = merged.generate(asked, PARAMS[case])
    found = llm.generate(asked, PARAMS[case], lora="a")
    for ours, theirs in zip(found, expected, strict=True):
        texts = [[c.token_ids for c in each.completions] for each in (ours, theirs)]
        assert texts[0] == texts[1]
        if case == "prompt_logprobs":
            assert ours.prompt_logprobs is not None
            pairs = zip(ours.prompt_logprobs[1:], theirs.prompt_logprobs[1:], strict=True)
            for got, wanted in pairs:
                assert got.chosen.logprob == pytest.approx(wanted.chosen.logprob, abs=1e-3)


@pytest.mark.parametrize(
    "quantization", ["none", "int8", pytest.param("int4", marks=pytest.mark.slow)]
)
def test_packed_and_tiled_layers(
    start: Start, quantization: str, make_tiny_model, tmp_path: Path
) -> None:
    """In bf16, the layers compute what those without adapters do, and the products beside them."""
    model = make_tiny_model(tmp_path / "model", hidden_size=96, initializer_range=0.2)
    adapter = save_adapter(model, tmp_path / "adapter", rank=8, size=0.5)
    settings = {"dtype": "bfloat16", "quantization": quantization, "max_lora_rank": 8}
    core = start(config(model, {"a": adapter}, **settings))
    layers = core.executor.worker.adapters.layers
    kinds = {type(layer.base).__name__ for layer in layers._layers.values()}
    assert "Linear" not in kinds, kinds
    draw = torch.Generator().manual_seed(3)
    pairs = {}
    for name, layer in layers._layers.items():
        rows = torch.randn(1, 5, layer.in_features, generator=draw).bfloat16()
        adapter_operator.CURRENT.rows = None
        plain = layer(rows)
        held = core.executor.worker.adapters._adapters
        (content,) = held.values()
        layers.put(3, content)
        adapter_operator.CURRENT.rows = layers.rows_of(torch.tensor([0, 3, 0, 3, 2]), 8)
        mixed = layer(rows)
        adapter_operator.CURRENT.rows = None
        pair = content.layers[name]
        added = (rows.float() @ pair.down.float().t()) @ pair.up.float()
        assert torch.equal(mixed[0, [0, 2, 4]], plain[0, [0, 2, 4]]), "rows without an adapter"
        torch.testing.assert_close(
            (mixed - plain)[0, [1, 3]].float(), added[0, [1, 3]], rtol=0.05, atol=0.1
        )
        pairs[name] = pair
    found = serve(
        core,
        {f"{lora}": GenerateRequest((5, 6, 7), GREEDY, lora=lora) for lora in ("a", None)},
    )
    assert found["a"] != found["None"]


def test_a_row_does_not_depend_on_the_adapters_of_others(
    tiny_model: Path, adapters: dict[str, Path]
) -> None:
    core = EngineCore(config(tiny_model, adapters))
    store = core.executor.worker.adapters
    for slot, content in enumerate(list(store._adapters.values())[:3], 1):
        store.layers.put(slot, content)
    (layer, *_) = store.layers._layers.values()
    layer.down[-1].fill_(3e38)  # the product overflows
    rows = torch.randn(6, layer.in_features)

    def computed(slots: list[int]) -> torch.Tensor:
        adapter_operator.CURRENT.rows = store.layers.rows_of(torch.tensor(slots), 64)
        try:
            return layer(rows)
        finally:
            adapter_operator.CURRENT.rows = None

    first, second = computed([1, 2, 0, 3, 1, 0]), computed([1, 3, 0, 3, 2, 8])
    assert torch.equal(first[[0, 2, 3]], second[[0, 2, 3]])
    assert not torch.equal(first[[1, 4]], second[[1, 4]])
    core.close()


def test_adapters_outlive_a_sleep(
    start: Start, tiny_model: Path, adapters: dict[str, Path], reference: Reference
) -> None:
    core = start(config(tiny_model, {}))
    prompt = prompts(1)[0]
    core.load_adapter("a", str(adapters["adapter-3"]))
    switcher = ModelSwitcher(core)
    for level in (1, 2):
        request = GenerateRequest(prompt, GREEDY, lora="a")
        assert serve(core, {"r": request})["r"] == reference.tokens("adapter-3", prompt, NUM_TOKENS)
        switcher.sleep(level)
        with pytest.raises(AdapterError, match="sleeps"):
            core.load_adapter("b", str(adapters["adapter-0"]))
        switcher.wake_up()
    assert serve(core, {"r": request})["r"] == reference.tokens("adapter-3", prompt, NUM_TOKENS)


def test_wrong_names_and_settings(tiny_model: Path, adapters: dict[str, Path]) -> None:
    core = EngineCore(config(tiny_model, {"a": adapters["adapter-0"]}))
    for name in ("", 3, None, "x" * 257, "\ud800", "a\nINFO b", "a\0b", "\u202e"):
        with pytest.raises(InvalidRequest, match="lora_name"):
            core.load_adapter(name, str(adapters["adapter-0"]))
        if name is not None:
            with pytest.raises(InvalidRequest, match="lora must be the name"):
                GenerateRequest((1,), GREEDY, lora=name)
    for path in ("", None, 3):
        with pytest.raises(InvalidRequest, match="lora_path"):
            core.load_adapter("b", path)
    with pytest.raises(AdapterError, match="'a' has already been loaded"):
        core.load_adapter("a", str(adapters["adapter-0"]))
    with pytest.raises(AdapterError, match="is the name of the model"):
        core.load_adapter(core.config.name, str(adapters["adapter-0"]))
    with pytest.raises(AdapterError, match="'b' is not loaded"):
        core.unload_adapter("b")
    with pytest.raises(AdapterError, match="name one of 'a'"):
        core.add("r", GenerateRequest((1,), GREEDY, lora="b"))
    assert [each.name for each in core.adapters] == ["a"]
    core.close()
    with pytest.raises(ConfigError, match=r"lora_modules: .*nowhere.*cannot be read"):
        EngineCore(config(tiny_model, {"a": Path("/nowhere")}))
    plain = EngineCore(config(tiny_model, {}, enable_lora=False))
    with pytest.raises(AdapterError, match="enable_lora"):
        plain.load_adapter("a", str(adapters["adapter-0"]))
    with pytest.raises(AdapterError, match="is not loaded: load it"):
        plain.add("r", GenerateRequest((1,), GREEDY, lora="a"))
    plain.close()


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"enable_lora": False}, r"lora_modules .* need enable_lora"),
        (
            {"max_loras": 1, "max_cpu_loras": 1, "lora_modules": {"a": "/b", "c": "/d"}},
            "names 2 adapters, and max_cpu_loras is 1",
        ),
        ({"runner": "pooling", "lora_modules": {}}, "runner pooling"),
        ({"max_loras": 0}, "max_loras"),
        ({"max_lora_rank": 0}, "max_lora_rank"),
        ({"max_loras": 4, "max_cpu_loras": 3}, "max_cpu_loras 3 is below max_loras 4"),
        ({"lora_modules": ["a=b"]}, "lora_modules must map"),
        ({"lora_modules": (("a", "b"), ("a", "c"))}, "twice"),
        ({"lora_modules": {"a": 3}}, "lora_modules must map"),
    ],
)
def test_settings_that_are_refused(
    settings: dict[str, object], reason: str, tiny_model: Path
) -> None:
    with pytest.raises(ConfigError, match=reason):
        EngineCore(config(tiny_model, {"a": Path("/nowhere")}, **settings))


def test_the_adapter_used_longest_ago_loses_its_slot_unless_it_is_in_use() -> None:
    slots = AdapterSlots(2)
    assert slots.of_step(["a", "b"], {"a", "b"}) == {"a": 1, "b": 2}
    assert slots.of_step(["b"], {"a", "b"}) == {"b": 2}
    assert slots.of_step(["a"], {"a"}) == {"a": 1}
    assert slots.of_step(["c"], {"b", "c"}) == {"c": 1}, "b waits to resume"
    assert slots.of_step(["a"], {"a"}) == {"a": 2}, "b was used before c"
    with pytest.raises(RuntimeError, match="2 adapter slots are in use"):
        slots.of_step(["d"], {"a", "c", "d"})
    assert dict(slots.held) == {"c": 1, "a": 2}


@pytest.mark.parametrize("stash_bytes", [0, 1 << 30])
def test_adapters_belong_to_a_model(
    start: Start,
    stash_bytes: int,
    tiny_model: Path,
    adapters: dict[str, Path],
    reference: Reference,
    make_tiny_model: Callable[..., Path],
    tmp_path: Path,
) -> None:
    """Each model has its own after switches, also where its weights were dropped meanwhile."""
    other = make_tiny_model(tmp_path / "other", intermediate_size=32)
    own = save_adapter(other, tmp_path / "own", rank=4, seed=9)
    first = config(tiny_model, {"a": adapters["adapter-0"]}, served_model_name="first")
    second = config(other, {"a": own}, served_model_name="second")
    expected = Reference(other, {"a": own}).tokens("a", (1, 2, 3), NUM_TOKENS)
    core = start(first)
    switcher = ModelSwitcher(core)
    core.load_adapter("b", str(adapters["adapter-1"]))
    core.load_adapter("c", str(shutil.copytree(adapters["adapter-2"], tmp_path / "gone")))
    shutil.rmtree(tmp_path / "gone")
    for _ in range(2):
        switcher.reconfigure_engine(config_payload(second), stash_bytes)
        assert [each.name for each in core.adapters] == ["a"]
        request = GenerateRequest((1, 2, 3), GREEDY, lora="a")
        assert serve(core, {"r": request})["r"] == expected
        with pytest.raises(AdapterError, match="'b' is not loaded"):
            core.add("r", GenerateRequest((1, 2, 3), GREEDY, lora="b"))
        switcher.reconfigure_engine(config_payload(first), stash_bytes)
        kept = ["a", "b", "c"] if stash_bytes else ["a", "b"]
        assert sorted(each.name for each in core.adapters) == kept
        for name, content in (("a", "adapter-0"), ("b", "adapter-1")):
            found = serve(core, {"r": GenerateRequest((1, 2, 3), GREEDY, lora=name)})
            assert found["r"] == reference.tokens(content, (1, 2, 3), NUM_TOKENS)


@pytest.mark.slow
def test_forty_adapters_of_many_ranks(tiny_model: Path, tmp_path: Path) -> None:
    """In batches of 32 rows with 8 adapters, with preemption, prefix hits, loads and unloads."""
    draw = random.Random(40)
    folders = {
        f"{number}": save_adapter(
            tiny_model,
            tmp_path / f"{number}",
            rank=(rank := draw.randint(4, 64)),
            seed=number,
            size=1 / rank**0.5,
            use_rslora=draw.random() < 0.3,
        )
        for number in range(40)
    }
    reference = Reference(tiny_model, folders)
    core = EngineCore(
        config(
            tiny_model,
            {},
            max_num_seqs=32,
            max_num_batched_tokens=64,
            num_blocks=70,
            num_host_blocks=40,
        )
    )
    core.warm_up()
    shared = prompts(30, seed=8)
    for number in range(8):
        loaded = draw.sample(sorted(folders), 12)
        for name in loaded:
            core.load_adapter(name, str(folders[name]))
        asked = {f"{number}/{i}": (draw.choice(loaded), draw.choice(shared)) for i in range(64)}
        for key, (name, prompt) in asked.items():
            core.add(key, GenerateRequest(prompt, GREEDY, lora=name))
        found: dict[str, list[int]] = {key: [] for key in asked}
        for name in loaded[:6]:
            core.unload_adapter(name)
        while core.has_work:
            for token in core.step():
                found[token.key].append(token.token_id)
        for key, (name, prompt) in asked.items():
            assert found[key] == reference.tokens(name, prompt, NUM_TOKENS), (key, name)
        for name in loaded[6:]:
            core.unload_adapter(name)
    assert core.stats.num_preemptions > 0
    assert core.stats.num_prefix_hit_tokens > 0
    assert not core.executor.worker.adapters._adapters
    core.close()


@pytest.mark.slow
@pytest.mark.model
def test_a_real_model_has_the_tokens_of_peft(start: Start, tmp_path: Path) -> None:
    model = Path(default_model())
    folders = {
        f"{rank}": save_adapter(model, tmp_path / f"{rank}", rank=rank, seed=rank, size=0.05)
        for rank in (4, 16, 64)
    }
    reference = Reference(model, folders)
    core = start(config(model, folders, max_loras=3))
    asked = {
        f"{name}/{i}": (name, prompt)
        for name in (*folders, None)
        for i, prompt in enumerate(prompts(3, seed=2))
    }
    found = serve(
        core,
        {key: GenerateRequest(prompt, GREEDY, lora=name) for key, (name, prompt) in asked.items()},
    )
    for key, (name, prompt) in asked.items():
        assert found[key] == reference.tokens(name, prompt, NUM_TOKENS), key
