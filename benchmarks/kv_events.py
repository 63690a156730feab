"""What KV events cost a step of the engine core: alone, and with subscribers.

    python benchmarks/kv_events.py [--rounds 12] [--sequences 32]
    python benchmarks/kv_events.py --small-model --rounds 3      # the default model in bf16 instead

Cores that differ in nothing but their events serve the same requests in turns, in one process:
``off``, and events with no subscriber, with one that reads all, and with one that has stopped
reading (a stopped process, whose messages are kept and then dropped by ZeroMQ). Two kinds of work:
``decode`` (few prompts, 100 tokens each) and ``turns`` (conversations whose prompts grow, in a
cache that holds a quarter of them, so that each step stores and evicts blocks). With ``empty``
execution a step is the core's own work alone, as beside a device that computes meanwhile; with
``model`` the forward passes of a random tiny model (2 layers of 32 wide) are part of it.

Both the time of the core's thread and that of the process, with the threads that publish, are
CPU time for each step; the ratios to ``off`` are medians of the rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import multiprocessing
import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.synchronize import Event

import attrs
import torch
import zmq
from core_step import make_model

from trencadis.engine import (
    EngineConfig,
    EngineCore,
    GenerateRequest,
    SamplingParams,
    default_model,
)
from trencadis.engine.runner.executor_choice import make_executor
from trencadis.engine.runner.step import PendingStep, StepInput, StepResult

SUBSCRIBERS = ("off", "none", "present", "stopped")
BLOCK = 16
SENT_AHEAD = 1000
"""Messages that ZeroMQ keeps for a subscriber; few, so that the stopped one soon misses some."""


@attrs.frozen
class Computed:
    """The result of a step that computes nothing."""

    result: StepResult

    def wait(self) -> StepResult:
        return self.result


def compute_nothing(step: StepInput) -> PendingStep:
    """Token 5 for every sequence."""
    return Computed(StepResult(token_ids=dict.fromkeys(step.rows, 5)))


@attrs.define
class Case:
    """A core, and the CPU seconds for each step of its last round: its thread's, the process's."""

    core: EngineCore
    answered: dict[int, tuple[int, ...]] = attrs.field(factory=dict)
    """What each user of ``turns`` has said and heard."""
    taken: list[tuple[float, float]] = attrs.field(factory=list)

    def run(self, work: str, sequences: int, number: int) -> None:
        core, asked = self.core, dict[str, tuple[int, ...]]()
        chance = random.Random(number)
        for index in range(sequences):
            words = tuple(chance.choices(range(10, 500), k=48))
            if work == "decode":
                asked[f"{index}"] = words
            else:
                user = chance.randrange(4 * sequences)
                past = self.answered.get(user, ())
                asked[f"{index}"] = self.answered[user] = (*past[-400:], *words)
        params = SamplingParams(
            temperature=0.0, max_tokens=100 if work == "decode" else 8, ignore_eos=True
        )
        for key, prompt in asked.items():
            core.add(key, GenerateRequest(prompt, params))
        steps = 0
        thread, process = time.thread_time(), time.process_time()
        while core.has_work:
            core.step()
            steps += 1
        thread = time.thread_time() - thread
        while (events := core._kv_events) is not None and not events._queue.empty():
            time.sleep(0.001)  # the publisher's work belongs to this round
        process = time.process_time() - process
        self.taken.append((thread / steps, process / steps))


@contextlib.contextmanager
def subscriber(endpoint: str, *, reads: bool) -> Iterator[None]:
    """A process that has subscribed; ``reads``: else it is stopped."""
    context = multiprocessing.get_context("spawn")
    is_ready = context.Event()
    process = context.Process(target=_subscribe, args=(endpoint, is_ready), daemon=True)
    process.start()
    is_ready.wait()
    if not reads and process.pid is not None:
        os.kill(process.pid, signal.SIGSTOP)
    yield
    process.kill()
    process.join()


def _subscribe(endpoint: str, is_ready: Event) -> None:
    socket = zmq.Context().socket(zmq.SUB)
    socket.set_hwm(SENT_AHEAD)
    socket.subscribe(b"")
    socket.connect(endpoint)
    socket.poll(500)
    is_ready.set()
    while True:
        socket.recv_multipart()


def make_core(model: str, sequences: int, endpoint: str | None, *, empty: bool) -> EngineCore:
    settings = {"enable_kv_cache_events": True, "endpoint": endpoint, "hwm": SENT_AHEAD}
    config = EngineConfig(
        model=model,
        dtype="bfloat16",
        max_model_len=1024,
        max_num_seqs=sequences,
        max_num_batched_tokens=2048,
        block_size=BLOCK,
        num_blocks=sequences * 30,
        warmup="none",
        kv_events_config=settings if endpoint else {},
    )
    executor = make_executor(config)
    core = EngineCore(config, executor)
    if empty:
        executor.execute = compute_nothing  # type: ignore[method-assign]
    return core


def measure(
    cases: Mapping[str, Case], work: str, sequences: int, rounds: int
) -> Iterator[tuple[str, list[tuple[float, float]]]]:
    """The times of each case, of rounds in turns; the first two are not counted."""
    order = list(cases.items())
    for number in range(rounds + 2):
        random.Random(number).shuffle(order)
        gc.collect()
        for _, case in order:
            case.run(work, sequences, number)
    for name, case in cases.items():
        yield name, case.taken[2:]
        case.taken.clear()
        case.answered.clear()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--small-model", action="store_true", help="execute the default model")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| execution | work | events | step | step of off | thread | process |")
    print("|---|---|---|--:|--:|--:|--:|")
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        model = default_model() if options.small_model else directory
        if not options.small_model:
            make_model(directory)
        for execution in ("model",) if options.small_model else ("empty", "model"):
            cases = {}
            for name in SUBSCRIBERS:
                endpoint = None if name == "off" else f"ipc://{directory}/{execution}-{name}"
                core = make_core(model, options.sequences, endpoint, empty=execution == "empty")
                stack.callback(core.close)
                if endpoint and name != "none":
                    stack.enter_context(subscriber(endpoint, reads=name == "present"))
                cases[name] = Case(core)
            for work in ("decode", "turns"):
                found = dict(measure(cases, work, options.sequences, options.rounds))
                off = found.pop("off")
                for name, taken in found.items():
                    _show(execution, work, name, off, taken)


def _show(
    execution: str,
    work: str,
    name: str,
    off: list[tuple[float, float]],
    taken: list[tuple[float, float]],
) -> None:
    def middle(of: Callable[[tuple[float, float], tuple[float, float]], float]) -> float:
        return statistics.median(of(one, other) for one, other in zip(off, taken, strict=True))

    print(
        f"| {execution} | {work} | {name} | {middle(lambda _, own: own[0]) * 1e6:.0f} µs "
        f"| {middle(lambda base, _: base[0]) * 1e6:.0f} µs "
        f"| {middle(lambda base, own: own[0] / base[0]):.3f} "
        f"| {middle(lambda base, own: own[1] / base[1]):.3f} |",
        flush=True,
    )


if __name__ == "__main__":
    main()
