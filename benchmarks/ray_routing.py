"""Conversations over two replicas of Ray Serve: Ray's routers by turn, by queue, by prefix.

    python benchmarks/ray_routing.py [--users 16] [--turns 6] [--rounds 3]

Each user's prompt holds what the user and the model have said before, and 96 new tokens; a replica
has blocks for ``--share`` of all conversations. Eight users at a time have a turn. Every router
serves the same conversations, in changing order, behind the same `Front`; "no front" is Ray's
default, to which its proxies send requests unread. A round begins with new conversations.

Printed are the share of prompt tokens that were prefix hits (``cached_tokens``), and the time to
the first token of all turns but the first, medians of the rounds. Needs Ray (``nox -s
"interop(ray)"`` has it). The model is the small default one, in float32, a thread for each replica.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import attrs
import httpx

from trencadis.engine import default_model

if importlib.util.find_spec("ray") is not None:
    import ray
    from ray import serve

    from trencadis.server.ray import build_app

SAID, HEARD = 96, 16
"""Tokens of a user and of an answer in each turn."""

BLOCK = 16

ROUTERS = {
    "no front": None,
    "in turn": "ray.serve.experimental.round_robin_router:RoundRobinRouter",
    "by queue": "ray.serve._private.request_router:PowerOfTwoChoicesRequestRouter",
    "by prefix": "",
}
"""The class of each router; the empty one is what a front has unless it is told."""


@attrs.define
class Round:
    """Prompt tokens, those of them that were hits, and times to the first token, in seconds."""

    prompt: int = 0
    cached: int = 0
    ttft_s: list[float] = attrs.field(factory=list)

    @property
    def figures(self) -> tuple[float, float, float]:
        cuts = statistics.quantiles(self.ttft_s, n=100)
        return self.cached / self.prompt, cuts[49], cuts[98]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--users", type=int, default=16)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--share", type=float, default=0.75)
    parser.add_argument("--port", type=int, default=28_200)
    args = parser.parse_args()
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": args.port})
    figures: dict[str, list[tuple[float, float, float]]] = {name: [] for name in ROUTERS}
    try:
        for number in range(args.rounds):
            order = list(ROUTERS)[number % len(ROUTERS) :] + list(ROUTERS)[: number % len(ROUTERS)]
            for name in order:
                start(ROUTERS[name], args.users, args.turns, args.share)
                figures[name].append(converse(args.port, args.users, args.turns, number).figures)
                hits, p50, p99 = figures[name][-1]
                print(
                    f"  {number} {name:10} {hits:.3f} {p50 * 1e3:.0f} {p99 * 1e3:.0f}", flush=True
                )
                serve.delete("llm")
    finally:
        serve.shutdown()
        ray.shutdown()
    print(f"{'router':10} {'hits':>6} {'p50 ms':>7} {'p99 ms':>7}")
    for name, rounds in figures.items():
        hits, p50, p99 = (statistics.median(column) for column in zip(*rounds, strict=True))
        print(f"{name:10} {hits:6.2f} {p50 * 1e3:7.0f} {p99 * 1e3:7.0f}")


def start(router: str | None, users: int, turns: int, share: float) -> None:
    """An application with two replicas, whose requests this router of Ray sends to one."""
    tokens = turns * (SAID + HEARD)
    deployment = {
        "num_replicas": 2,
        "ray_actor_options": {"num_cpus": 1},
    }
    if router:
        deployment["request_router_config"] = {"request_router_class": router.replace(":", ".")}
    settings = {
        "model": str(default_model()),
        "served-model-name": "small",
        "dtype": "float32",
        "warmup": "none",
        "max-num-seqs": 8,
        "max-model-len": tokens + BLOCK,
        "block-size": BLOCK,
        "num-gpu-blocks-override": int(users * tokens / BLOCK * share),
        "deployment": deployment,
    }
    serve.run(build_app(settings | ({} if router is None else {"front": {}})), name="llm")


def converse(port: int, users: int, turns: int, number: int) -> Round:
    said: dict[int, list[int]] = {user: [] for user in range(users)}
    found = Round()

    def take_turn(user: int, turn: int) -> None:
        said[user] += random.Random(f"{number} {turn} {user}").choices(range(1000, 9000), k=SAID)
        wait_s, answer, usage = ask(port, said[user])
        said[user] += answer
        if turn:
            found.prompt += usage["prompt_tokens"]
            found.cached += usage["prompt_tokens_details"]["cached_tokens"]
            found.ttft_s.append(wait_s)

    ask(port, [1, 2, 3])
    with ThreadPoolExecutor(8) as pool:
        for turn in range(turns):
            order = random.Random(f"{number} {turn}").sample(range(users), k=users)
            list(pool.map(take_turn, order, [turn] * users))
    return found


def ask(port: int, prompt: list[int]) -> tuple[float, list[int], dict]:
    """The time to the first token, the tokens, and the usage of a streamed request."""
    body = {
        "model": "small",
        "prompt": prompt,
        "max_tokens": HEARD,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    url = f"http://127.0.0.1:{port}/v1/completions"
    started = time.perf_counter()
    wait_s, tokens, usage = 0.0, [], {}
    with httpx.stream("POST", url, json=body, timeout=300) as response:
        for line in response.iter_lines():
            data = line.removeprefix("data: ").strip()
            if not data or data == "[DONE]":
                continue
            chunk = json.loads(data)
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                wait_s = wait_s or time.perf_counter() - started
                tokens += choice.get("token_ids") or []
    return wait_s, tokens, usage


if __name__ == "__main__":
    main()
