"""The log of a start is that of seed 000, line by line and in its order."""

from __future__ import annotations

import logging
import re

import pytest

from trencadis.engine import EngineConfig, EngineCore
from trencadis.warmup import WarmupConfig

SEED_000 = """\
Prompt bucket config (min, step, max_warmup) bs:[1, 32, 4], seq:[128, 128, 1024]
Generated 24 prompt buckets: [(1, 128), (4, 1024)]
Decode bucket config (min, step, max_warmup) bs:[1, 128, 4], seq:[128, 128, 2048]
Generated 48 decode buckets: [(1, 128), (4, 2048)]
Pre-loading model weights on hpu:0 took 14.97 GiB of device memory (14.97 GiB/94.62 GiB used) and \
2.95 GiB of host memory (475.2 GiB/1007 GiB used)
Wrapping in HPU Graph took 0 B of device memory (14.97 GiB/94.62 GiB used) and -252 KiB of host \
memory (475.2 GiB/1007 GiB used)
Loading model weights took in total 14.97 GiB of device memory (14.97 GiB/94.62 GiB used) and \
2.95 GiB of host memory (475.2 GiB/1007 GiB used)
Model profiling run took 504 MiB of device memory (15.46 GiB/94.62 GiB used) and 180.9 MiB of host \
memory (475.4 GiB/1007 GiB used)
Free device memory: 79.16 GiB, 39.58 GiB usable (gpu_memory_utilization=0.5), 15.83 GiB reserved \
for HPUGraphs (VLLM_GRAPH_RESERVED_MEM=0.4), 23.75 GiB reserved for KV cache
# HPU blocks: 1519, # CPU blocks: 0
Initializing cache engine took 23.73 GiB of device memory (39.2 GiB/94.62 GiB used) and -1.238 MiB \
of host memory (475.4 GiB/1007 GiB used)
[Warmup][Prompt][1/24] batch_size:4 seq_len:1024 free_mem:55.43 GiB
[Warmup][Decode][48/48] batch_size:1 seq_len:128 free_mem:55.43 GiB
Using 15.85 GiB/55.43 GiB of free device memory for HPUGraphs, 4.755 GiB for prompt and 11.095 GiB \
for decode (VLLM_GRAPH_PROMPT_RATIO=0.3)
[Warmup][Graph/Prompt][1/24] batch_size:1 seq_len:128 free_mem:55.43 GiB
[Warmup][Graph/Decode][1/48] batch_size:4 seq_len:128 free_mem:47.51 GiB
Graph/Prompt captured:15 (62.5%) used_mem:14.03 GiB buckets:[(1, 128), (4, 256)]
Graph/Decode captured:48 (100.0%) used_mem:161.9 MiB buckets:[(1, 128), (4, 2048)]
Warming up sampler with batch sizes: [0, 1, 138] and following configs:
temp=0.0, top_p=1.0, top_k=0, batch_changed=True
temp=0.8, top_p=0.85, top_k=0, batch_changed=False
Starting sampler warmup...
Sampler warmup completed successfully
Warming up defragmenter with thresholds: [8, 16, 32, 64, 128, 256, 512]
Defragmenter warmup completed successfully
Warmup finished in 49 secs, allocated 14.19 GiB of device memory
init_cache_engine took 37.92 GiB of device memory (53.39 GiB/94.62 GiB used) and 57.86 MiB of host \
memory (475.4 GiB/1007 GiB used)
""".splitlines()
"""Lines 39 to 67 and 121 to 182 without the time and the place in the source; lists are shortened.
"""

_FIGURE = re.compile(r"(?<![A-Za-z])-?\d+(\.\d+)?(e\+\d+)?( ([KMG]i)?B\b)?")


def kind(line: str) -> str:
    """A log line without its figures: two lines of one kind have the same words."""
    line = re.sub(r"(?<=ts:|es:)( ?)\[.*\]", r"\1[]", line)
    line = re.sub(r"thresholds: \[.*", "thresholds: []", line)
    return _FIGURE.sub("N", line)


def expect(seed: list[str], messages: list[str]) -> None:
    """Every line of the seed is in the log, in the same order."""
    lines = iter([kind(message) for message in messages])
    for line in seed:
        expected = kind(line)
        assert any(found == expected for found in lines), f"not in the log, or too early: {line}"


SETTINGS = {"dtype": "float32", "max_model_len": 48, "block_size": 8, "max_num_batched_tokens": 16}
"""Of the tiny model."""


def start(model: object, caplog: pytest.LogCaptureFixture, **changes: object) -> list[str]:
    """The log of a start."""
    settings = {**SETTINGS, "max_num_seqs": 2, "bucket_grid": "seq", **changes}
    with caplog.at_level(logging.INFO):
        core = EngineCore(EngineConfig(model=str(model), **settings))
        core.warm_up()
        core.close()
    return caplog.messages


def test_a_start_with_graphs_has_every_line_of_the_seed_in_its_order(
    lazy_gaudi: object, tiny_model: object, caplog: pytest.LogCaptureFixture
) -> None:
    expect(SEED_000, start(tiny_model, caplog, device="hpu", swap_space=0))


def test_a_start_without_graphs_has_the_same_lines_but_those_of_graphs(
    tiny_model: object, caplog: pytest.LogCaptureFixture
) -> None:
    graphs = WarmupConfig(graph_reserved_mem=0.4)
    messages = start(tiny_model, caplog, device="cpu", graphs=graphs)
    names = {
        "hpu:0": "cpu",
        "# HPU blocks: 1519, # CPU": "# CPU blocks: 1519, # swap",
        "Wrapping in HPU Graph": "Optimizing layers",
    }
    seed = "\n".join(SEED_000)
    for name, here in names.items():
        seed = seed.replace(name, here)
    of_graphs = re.compile(r"Using|Graph|\[Warmup\]\[Graph")
    expect([line for line in seed.splitlines() if not of_graphs.match(line)], messages)
    assert any(
        re.search(r"usable .*, 0 B reserved for HPUGraphs \(VLLM_GRAPH_RESERVED_MEM=0\)", line)
        for line in messages
    )
    assert (
        "VLLM_GRAPH_RESERVED_MEM=0.4 is not applied: no graphs are captured (device cpu)"
        in messages
    )


@pytest.mark.slow
def test_memory_that_the_cache_does_not_take_is_not_given_to_graphs(
    lazy_gaudi: object, tiny_model: object, caplog: pytest.LogCaptureFixture
) -> None:
    # Two sequences of 48 tokens need a few blocks of the gigabytes that are planned for the cache.
    messages = start(tiny_model, caplog, device="hpu")
    assert any("(VLLM_GRAPH_RESERVED_MEM=0.1)" in message for message in messages)
    (reserved,) = (
        re.search(r"([\d.]+) ([KMG]iB) reserved for HPUGraphs", m)
        for m in messages
        if "reserved for HPUGraphs" in m
    )
    (used,) = (
        re.match(r"Using ([\d.]+) ([KMG]iB)/", m) for m in messages if m.startswith("Using ")
    )
    assert used[2] == reserved[2]
    assert float(used[1]) <= float(reserved[1]) * 1.01
    (left,) = (m for m in messages if "stay free" in m)
    assert "planned for the KV cache stay free" in left
    assert "graphs do not" in left
