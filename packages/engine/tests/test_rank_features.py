"""What several ranks serve besides plain generation: embeddings, scores, compiled layers, tiers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import test_embeddings as embeddings
import test_scoring as scoring
from child_processes import children
from request_mix import serve
from test_prefix_tiers import Served, config_of
from test_ranks import _one_thread, assert_equal, start, ways  # noqa: F401  (fixtures)
from test_scoring import published, shared_renderer  # noqa: F401  (fixtures)
from transformers import LlamaForSequenceClassification

from trencadis.engine import LLM, EngineCore
from trencadis.engine.core.reconfigure import ModelSwitcher
from trencadis.engine.devices.inductor import cpp_compiler_missing

pytestmark = pytest.mark.slow


@pytest.fixture
def in_ranks(own_processes: None) -> Iterator[Callable[..., LLM]]:
    """Makes engines of two ranks, and ends them after the test: no process is left."""
    made: list[LLM] = []

    def make(pools: Callable[..., LLM], checkpoint: Path, **changes: Any) -> LLM:
        made.append(pools(checkpoint, tensor_parallel_size=2, **changes))
        return made[-1]

    yield make
    for llm in made:
        llm.core.close()
    assert not [each for each in children() if "rank_process" in " ".join(each.cmdline())]


def test_embeddings_of_two_ranks_are_those_of_transformers(
    tmp_path: Path,
    make_tiny_model: Callable[..., Path],
    add_tokenizer: Callable[[Path], None],
    in_ranks: Callable[..., LLM],
) -> None:
    """Also of a checkpoint without an output head."""
    model = make_tiny_model(tmp_path / "whole")
    headless = embeddings.AutoModel.from_pretrained(model)
    headless.save_pretrained(tmp_path / "headless")
    add_tokenizer(tmp_path / "headless")
    expected = embeddings.hidden_states(model)
    for checkpoint in (model, tmp_path / "headless"):
        llm = in_ranks(embeddings.pooling, checkpoint)
        assert embeddings.close(embeddings.vectors_of(llm), expected)
        llm.core.close()


def test_scores_of_two_ranks_are_those_of_transformers(
    tmp_path: Path,
    published: Path,  # noqa: F811
    in_ranks: Callable[..., LLM],
) -> None:
    """By two rows of an output head that is divided, which are of the last rank, and by a head of
    their own."""
    prompts = [scoring.model_card(scoring.QUERY, each) for each in scoring.DOCUMENTS]
    expected = [scoring.softmax(*logits) for logits in scoring.answers(published, prompts)]
    assert scoring.close(scoring.scores_of(in_ranks(scoring.scorer, published)), expected)
    head = scoring.save_classifier(tmp_path / "head", LlamaForSequenceClassification)
    prompts = [scoring.by_roles(document) for document in scoring.DOCUMENTS]
    expected = scoring.sigmoid(scoring.heads(head, prompts))
    assert scoring.close(scoring.scores_of(in_ranks(scoring.scorer, head)), expected)


@pytest.mark.skipif(cpp_compiler_missing() is not None, reason="needs a C++ compiler")
def test_compiled_layers_of_two_ranks_compute_what_one_process_does(
    tiny_model: Path,
    tmp_path: Path,
    start: Callable[..., EngineCore],  # noqa: F811
) -> None:
    """Sums over ranks are parts of the programs."""
    cache = tmp_path / "programs"
    changes = {"compile": True, "warmup": "full", "compile_cache": str(cache)}
    core = start(tiny_model, **changes)
    assert list(cache.rglob("*.so")), "programs were compiled"
    mixed = [params for way in ways() for params in way]
    assert_equal(serve(core, mixed, 24), serve(start(tiny_model, 1), mixed, 24))
    assert core.stats.num_cold_forwards == 0


def test_tiers_of_two_ranks_give_prefixes_back(
    tiny_model: Path, tmp_path: Path, own_processes: None
) -> None:
    """Through swaps, a sleep, and another start with the same directory."""
    changes: dict[str, Any] = {"num_host_blocks": 12}
    alone = Served(config_of(tiny_model, **changes))
    alone.chat()
    for tiers, least in (("host:1", 20), (f"disk:{tmp_path}:1", 20), (f"disk:{tmp_path}:1", 60)):
        served = Served(config_of(tiny_model, tiers, tensor_parallel_size=2, **changes))
        try:
            served.chat(num_turns=2)
            switcher = ModelSwitcher(served.core)
            switcher.sleep(1)
            switcher.wake_up()
            served.chat(2, 2)
            stats = served.core.stats
            used = stats.disk_tier if "disk" in tiers else stats.host_tier
            assert served.answers == alone.answers
            assert used is not None
            assert used.num_loaded_blocks >= least
            assert used.num_errors == 0
            assert used.num_loaded_bytes == used.num_loaded_blocks * served.core.facts.block_bytes
            assert served.core.facts.block_bytes == alone.core.facts.block_bytes
        finally:
            served.close()
    alone.close()
    assert not children()
