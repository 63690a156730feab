"""Clients that wait get equal service, whatever one of them sends (the virtual token counter)."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterable

import attrs
import pytest
from harness import Memory, Runner, alone, num_scheduled_tokens, outcome
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from trencadis.kvcache import BlockManager, CacheConfig
from trencadis.scheduler import (
    QueueFull,
    Request,
    Scheduler,
    SchedulerConfig,
    SequenceGroup,
    SequenceStatus,
    UnservableRequest,
)
from trencadis.scheduler.fair_share import MAX_IDLE_CLIENTS, OUTPUT_WEIGHT, ClientShares

LONGEST_PROMPT = 12
MOST_OUTPUT = 6
WAITING, FINISHED = SequenceStatus.WAITING, SequenceStatus.FINISHED


@attrs.define
class Clients:
    """A scheduler and the requests of its clients, whose prompts share no blocks."""

    runner: Runner
    groups: dict[str, list[SequenceGroup]] = attrs.field(factory=dict)
    names: itertools.count[int] = attrs.field(factory=itertools.count)

    def send(
        self, client: str, length: int = 4, max_tokens: int = 4, **fields: object
    ) -> SequenceGroup:
        number = next(self.names)
        request = Request(
            request_id=f"r{number}",
            prompt_token_ids=tuple(hash((number, i)) % 1000 for i in range(length)),
            max_tokens=max_tokens,
            client=client,
            **fields,
        )
        group = self.runner.add(request)
        self.groups.setdefault(client, []).append(group)
        return group

    def num_waiting(self, client: str) -> int:
        return sum(group.status is WAITING for group in self.groups.get(client, ()))

    def service(self, client: str) -> int:
        """Prompt tokens of the admitted requests, and twice the output tokens of all."""
        return sum(
            group.request.num_prompt_tokens * (group.status is not WAITING)
            + OUTPUT_WEIGHT * sum(s.num_output_tokens for s in group.results)
            for group in self.groups.get(client, ())
        )

    def start_order(self, groups: Iterable[SequenceGroup]) -> list[SequenceGroup]:
        """The groups in the order in which they start, which takes some steps."""
        waiting, started = list(groups), []
        while waiting:
            self.runner.step()
            new = [group for group in waiting if group.status is not WAITING]
            started += new
            waiting = [group for group in waiting if group.status is WAITING]
        return started


def make(
    num_blocks: int = 400, clock: Callable[[], float] = time.monotonic, **config: object
) -> Clients:
    blocks = BlockManager(
        CacheConfig(num_blocks=num_blocks, block_size=4, watermark=0.0, enable_prefix_caching=False)
    )
    defaults: dict[str, object] = {"max_num_seqs": 1, "max_num_batched_tokens": 64}
    settings = SchedulerConfig(max_model_len=200, **(defaults | config))
    scheduler = Scheduler(settings, blocks, clock=clock)
    return Clients(Runner(scheduler, Memory(4)))


@settings(max_examples=60, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(
    more=st.lists(st.sampled_from([0, 1, 25]), min_size=2, max_size=4),
    max_num_seqs=st.sampled_from([1, 2, 4, 9]),
    policy=st.sampled_from(["fcfs", "priority"]),
    seed=st.integers(0, 1000),
)
def test_the_service_of_clients_that_wait_differs_by_two_batches_at_most(
    more: list[int], max_num_seqs: int, policy: str, seed: int
) -> None:
    """However many requests each keeps in the queue, and in whatever interval."""
    clients, rng = make(max_num_seqs=max_num_seqs, policy=policy), random.Random(seed)
    names = [f"client {i}" for i in range(len(more))]
    history: list[list[int]] = []
    for _ in range(40):
        for name, count in zip(names, more, strict=True):
            while clients.num_waiting(name) <= max_num_seqs + count:  # more than a step can start
                length, output = rng.randint(1, LONGEST_PROMPT), rng.randint(1, MOST_OUTPUT)
                clients.send(name, length, output)
        clients.runner.step()
        history.append([clients.service(name) for name in names])
    batch = LONGEST_PROMPT + OUTPUT_WEIGHT * max_num_seqs * MOST_OUTPUT
    for i, j in itertools.combinations(range(len(names)), 2):
        ahead = [services[i] - services[j] for services in history]
        assert max(ahead) - min(ahead) <= 2 * batch


def test_an_output_token_costs_as_much_as_two_of_the_prompt() -> None:
    """The weights of the paper on the virtual token counter, https://arxiv.org/abs/2401.00588."""
    assert OUTPUT_WEIGHT == 2


def test_one_request_starts_next_however_many_another_client_has_sent_before() -> None:
    clients = make()
    flood = [clients.send("flood") for _ in range(50)]
    clients.runner.step()
    trickle = clients.send("trickle")
    first, *_ = clients.start_order([*flood[1:3], trickle])
    assert first is trickle
    clients.runner.run()
    assert outcome(trickle) == alone(trickle.request, 200)


def test_a_flood_leaves_an_eighth_of_the_sequences_to_those_that_return() -> None:
    now = [0.0]
    clients = make(max_num_seqs=16, clock=lambda: now[0])
    clients.send("trickle")
    clients.runner.run()
    for _ in range(40):
        clients.send("flood", max_tokens=50)
    clients.runner.step()
    assert clients.runner.scheduler.num_running == 14
    trickle = clients.send("trickle")
    clients.runner.step()
    assert trickle.status is SequenceStatus.RUNNING
    assert clients.runner.scheduler.num_running == 15
    while trickle.status is not FINISHED:
        clients.runner.step()
    now[0] = 61.0
    clients.runner.step()
    assert clients.runner.scheduler.num_running == 16, "nobody else is expected any more"


def test_a_client_that_fills_the_kv_cache_does_not_keep_the_free_blocks_for_itself() -> None:
    """Its preempted requests would otherwise precede all that wait for hundreds of steps."""
    clients = make(num_blocks=20, max_num_seqs=16, max_num_batched_tokens=256)
    flood = [clients.send("flood", 8, 40) for _ in range(30)]
    for _ in range(30):
        clients.runner.step()
    assert clients.runner.scheduler.num_preemptions
    for _ in range(12):
        request = clients.send("trickle", 4, 2)
        for _ in range(10):
            clients.runner.step()
        assert request.status is not WAITING
        while request.status is not FINISHED:
            clients.runner.step()
    clients.runner.run()
    assert all(outcome(group) == alone(group.request, 200) for group in flood)


@pytest.mark.parametrize("length", [4, 40])
def test_a_preempted_request_finishes_while_new_clients_never_stop_arriving(length: int) -> None:
    clients = make(num_blocks=20, max_num_seqs=16, max_num_batched_tokens=256)
    large = [clients.send("large", 8, 60) for _ in range(3)]
    for name in itertools.count():
        if all(group.status is FINISHED for group in large):
            break
        assert name < 2000
        clients.send(f"new {name}", length, 4)
        clients.runner.step()
    assert clients.runner.scheduler.num_preemptions
    assert all(outcome(group) == alone(group.request, 200) for group in large)


@settings(max_examples=30, deadline=None)
@given(
    max_bypasses=st.sampled_from([0, 1, 5, 16]),
    max_num_seqs=st.sampled_from([1, 4, 9]),
    num_requests=st.integers(1, 3),
    policy=st.sampled_from(["fcfs", "priority"]),
    seed=st.integers(0, 1000),
)
def test_a_client_of_much_service_waits_for_a_bounded_number_of_new_clients(
    max_bypasses: int, max_num_seqs: int, num_requests: int, policy: str, seed: int
) -> None:
    """However many names arrive, each for the first time, and always some of them wait."""
    clients = make(max_num_seqs=max_num_seqs, max_bypasses=max_bypasses, policy=policy)
    rng, names = random.Random(seed), map("new {}".format, itertools.count())
    new: list[SequenceGroup] = []

    def fill() -> None:
        while clients.runner.scheduler.num_waiting < 20:
            new.append(clients.send(next(names), rng.randint(1, 12), rng.randint(1, 6)))

    clients.send("much", 8, 150)
    clients.runner.run()
    fill()
    clients.runner.step()
    for _ in range(num_requests):
        num_older = sum(group.finish_reason is None for group in new) + len(
            [group for group in clients.groups["much"] if group.finish_reason is None]
        )
        request = clients.send("much", 4, 4)
        while request.status is WAITING:
            later = [group for group in new if group.arrival > request.arrival]
            num_started = sum(group.status is not WAITING for group in later)
            assert num_started <= (num_older + 1) * max_bypasses
            fill()
            clients.runner.step()


@settings(max_examples=8, deadline=None)
@given(st.lists(st.integers(1, 1500), min_size=1, max_size=5), st.booleans())
@example([1, 36, 1500, 1], False)
def test_the_names_of_clients_without_requests_take_no_memory_without_bound(
    counts: list[int], charged: bool
) -> None:
    shares, names = ClientShares(), map(str, itertools.count())
    for i, count in enumerate(counts):
        clients = [shares.enter_queue(next(names), float(i), i) for _ in range(count)]
        assert len(shares._clients) <= MAX_IDLE_CLIENTS + count
        assert all(shares._clients[client.name] is client for client in clients)
        for client in clients:
            client.service += 50 * charged
            shares.leave_queue(client)
            shares.remove(client)


def test_a_client_that_exceeds_its_share_does_not_get_what_is_left_to_others() -> None:
    clients = make(max_num_seqs=16)
    for client in ("a", "b"):
        for _ in range(20):
            clients.send(client, max_tokens=50)
    clients.runner.step()
    running = [
        sum(group.status is SequenceStatus.RUNNING for group in clients.groups[client])
        for client in ("a", "b")
    ]
    assert running == [8, 8] or sum(running) == 14


def flooded(**config: object) -> Clients:
    """Two clients are expected, and one of them runs 14 of 16 sequences, and has more waiting."""
    clients = make(max_num_seqs=16, **config)
    clients.send("trickle")
    clients.runner.run()
    for _ in range(40):
        clients.send("flood", max_tokens=50, priority=5)
    clients.runner.step()
    assert clients.runner.scheduler.num_running == 14
    return clients


def test_what_is_left_to_other_clients_is_open_to_one_that_got_more_service() -> None:
    """It runs none, while the client with the least service has its part of the sequences."""
    clients = flooded()
    clients.runner.scheduler._states.shares._clients["trickle"].service = 10**6
    trickle = clients.send("trickle")
    clients.runner.step()
    assert trickle.status is SequenceStatus.RUNNING


def test_what_is_left_to_other_clients_is_open_to_a_higher_priority() -> None:
    clients = flooded(policy="priority")
    urgent = clients.send("flood", priority=1)
    usual = clients.send("flood", priority=5)
    clients.runner.step()
    assert urgent.status is SequenceStatus.RUNNING
    assert usual.status is WAITING


def test_what_is_left_to_other_clients_is_open_to_an_overdue_request() -> None:
    clients = flooded(max_bypasses=2)
    oldest = next(group for group in clients.groups["flood"] if group.status is WAITING)
    for _ in range(2):
        clients.runner.scheduler._states.count_bypass(oldest)
    clients.runner.step()
    assert oldest.status is SequenceStatus.RUNNING
    assert clients.runner.scheduler.num_running == 15


def prefilling(length: int = 120, **config: object) -> tuple[Clients, SequenceGroup]:
    """Two clients: one runs three of four sequences, and computes the long prompt of the last."""
    clients = make(**({"max_num_seqs": 4, "max_num_batched_tokens": 16} | config))
    clients.send("trickle", 1, 1)
    clients.runner.run()
    for _ in range(2):
        clients.send("flood", 4, 150)
    clients.runner.step()
    long = clients.send("flood", length, 4)
    clients.runner.step()
    assert 0 < long.allocated_seqs[0].num_computed_tokens < length
    return clients, long


def num_computed(group: SequenceGroup) -> int:
    return group.allocated_seqs[0].num_computed_tokens


def test_a_new_request_is_computed_before_the_rest_of_a_prompt_of_a_flood() -> None:
    clients, long = prefilling()
    before = num_computed(long)
    trickle = clients.send("trickle", 12, 2)
    clients.runner.step()
    assert trickle.unfinished_seqs[0].num_output_tokens == 1
    assert num_computed(long) == before + 16 - 2 - 12, "what is left of the step is not wasted"
    clients.runner.run()
    for group in (trickle, long):
        assert outcome(group) == alone(group.request, 200)


def test_a_prompt_of_a_client_below_its_share_is_computed_first_also_in_later_steps() -> None:
    clients, long = prefilling()
    before = num_computed(long)
    trickle = clients.send("trickle", 28, 2)
    clients.runner.step()
    assert (num_computed(trickle), num_computed(long)) == (14, before)
    clients.runner.step()
    assert trickle.unfinished_seqs[0].num_output_tokens == 1
    assert num_computed(long) == before


def test_a_prompt_of_a_higher_priority_is_computed_first_whosever_it_is() -> None:
    clients, long = prefilling(policy="priority")
    before = num_computed(long)
    trickle = clients.send("trickle", 12, 2, priority=1)
    clients.runner.step()
    assert trickle.status is WAITING
    assert num_computed(long) == before + 14
    clients.send("trickle", 12, 2, priority=-1)
    clients.runner.step()
    assert num_computed(long) == before + 14 + 2


def steps_to_first_token(clients: Clients, groups: Iterable[SequenceGroup]) -> list[int]:
    """The step in which each group gets its first token, from now on; all finish."""
    groups = list(groups)
    first = dict.fromkeys(range(len(groups)), 0)
    for number in range(1, 2000):
        if not clients.runner.scheduler.has_work:
            return list(first.values())
        clients.runner.step()
        for i, group in enumerate(groups):
            if not first[i] and any(sample.num_output_tokens for sample in group.results):
                first[i] = number
    raise AssertionError("requests are unfinished")


@pytest.mark.parametrize("n", [1, 3])
def test_one_long_request_is_no_flood_however_many_clients_there_are(n: int) -> None:
    """Its part of the limit is a single sequence, which any request has."""
    clients = make(max_num_seqs=8, max_num_batched_tokens=16)
    for name in range(6):
        clients.send(f"other {name}", 1, 1)
    clients.runner.run()
    long = clients.send("long", 150, 2, n=n)
    for step in range(1, 12):
        for _ in range(2):
            clients.send(f"other {step % 6}", 16, 1)
        clients.runner.step()
    assert any(sample.num_output_tokens for sample in long.results)
    clients.runner.run()


@pytest.mark.parametrize("max_num_seqs", [6, 8])
def test_a_client_within_its_part_computes_its_prompt_before_new_requests(
    max_num_seqs: int,
) -> None:
    clients, long = prefilling(max_num_seqs=max_num_seqs)
    before = num_computed(long)
    clients.send("trickle", 12, 2)
    clients.runner.step()
    assert num_computed(long) == before + 14


@pytest.mark.parametrize("num_each", [1, 2])
def test_a_burst_of_equal_clients_gets_its_first_tokens_as_early_as_in_order_of_arrival(
    num_each: int,
) -> None:
    """As many clients as sequences. With ``max_bypasses`` 0 no prefill is deferred."""
    waits = []
    for max_bypasses in (16, 0):
        clients = make(max_num_seqs=8, max_num_batched_tokens=16, max_bypasses=max_bypasses)
        burst = [clients.send(f"{name}", 40, 3) for _ in range(num_each) for name in range(8)]
        waits.append(sum(steps_to_first_token(clients, burst)))
    assert waits[0] <= waits[1]


def test_the_prompts_of_one_client_are_computed_in_their_order() -> None:
    clients = make(max_num_seqs=4, max_num_batched_tokens=16)
    first, second = (clients.send("", 40, 2) for _ in range(2))
    clients.runner.step()
    assert first.status is SequenceStatus.RUNNING
    assert second.status is WAITING
    for _ in range(2):
        clients.runner.step()
    assert first.unfinished_seqs[0].num_output_tokens == 1
    assert num_computed(second) == 8


@pytest.mark.parametrize("max_bypasses", [0, 3])
def test_a_prompt_of_a_flood_advances_while_new_requests_never_stop(max_bypasses: int) -> None:
    clients, long = prefilling(100, max_bypasses=max_bypasses, num_blocks=2000)
    steps_without = 0
    while num_computed(long) < 100:
        before = num_computed(long)
        while clients.num_waiting("trickle") < 3:
            clients.send("trickle", 40, 1)
        clients.runner.step()
        steps_without = 0 if num_computed(long) > before else steps_without + 1
        assert steps_without <= max_bypasses
    clients.runner.run()
    assert all(outcome(g) == alone(g.request, 200) for g in (long, *clients.groups["trickle"]))


@pytest.mark.parametrize("max_bypasses", [0, 3])
@pytest.mark.parametrize("fields", [{"n": 2}, {"n": 1, "best_of": 2}], ids=["n", "best_of"])
def test_a_recomputed_sample_of_a_flood_advances_while_another_of_its_request_decodes(
    max_bypasses: int, fields: dict[str, int]
) -> None:
    clients = make(
        max_num_seqs=6,
        max_num_batched_tokens=16,
        max_bypasses=max_bypasses,
        num_blocks=4000,
        force_evict_hold_s=0.0,
    )
    clients.send("trickle", 1, 1)
    clients.runner.run()
    for _ in range(2):
        clients.send("flood", 4, 190)
    samples = clients.send("flood", 4, 150, **fields)
    for _ in range(30):
        clients.runner.step()
    clients.runner.scheduler.abort_and_swap([samples.request_id])
    steps_without = 0
    while samples.status is not FINISHED:
        while clients.num_waiting("trickle") < 3:
            clients.send("trickle", 40, 1)
        output, _ = clients.runner.step()
        computed = {scheduled.seq_id for scheduled in output.prompts}
        remaining = [s for s in samples.allocated_seqs if s.num_slots > s.num_computed_tokens + 1]
        waits = remaining and computed.isdisjoint(s.seq_id for s in samples.allocated_seqs)
        steps_without = steps_without + 1 if waits else 0
        assert steps_without <= max_bypasses
    assert clients.runner.scheduler.num_recomputes == 1
    clients.runner.run()
    assert outcome(samples) == alone(samples.request, 200)


@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(
        st.tuples(
            st.sampled_from(["flood", "flood", "a", "b"]), st.integers(1, 60), st.integers(1, 12)
        ),
        min_size=1,
        max_size=30,
    ),
    pauses=st.lists(st.integers(0, 3), min_size=30, max_size=30),
    max_num_seqs=st.sampled_from([2, 4, 8]),
    max_bypasses=st.sampled_from([0, 2, 16]),
    policy=st.sampled_from(["fcfs", "priority"]),
    num_samples=st.lists(st.sampled_from([1, 1, 2]), min_size=30, max_size=30),
    num_blocks=st.sampled_from([400, 48]),
)
def test_no_step_has_tokens_left_while_a_prompt_waits_for_them(
    requests: list[tuple[str, int, int]],
    pauses: list[int],
    max_num_seqs: int,
    max_bypasses: int,
    policy: str,
    num_samples: list[int],
    num_blocks: int,
) -> None:
    """Whosever prompts are computed first, and each request gets the tokens that it gets alone.

    Also those of several samples that were recomputed because blocks ran out.
    """
    clients = make(
        num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=16,
        max_bypasses=max_bypasses,
        policy=policy,
    )

    def step() -> None:
        output, _ = clients.runner.step()
        is_full = num_scheduled_tokens(output) == 16
        for group in itertools.chain(*clients.groups.values()):
            if group.status is SequenceStatus.RUNNING and not is_full:
                assert num_computed(group) >= group.request.num_prompt_tokens
                assert all(s.num_computed_tokens >= s.num_slots for s in group.allocated_seqs)

    for (client, length, max_tokens), pause, n in zip(requests, pauses, num_samples, strict=False):
        clients.send(client, length, max_tokens, priority=length % 3, n=n)
        for _ in range(pause):
            step()
    while clients.runner.scheduler.has_work:
        step()
    for group in itertools.chain(*clients.groups.values()):
        assert outcome(group) == alone(group.request, 200)


def test_the_requests_of_a_client_start_in_their_order() -> None:
    clients = make()
    sent = [clients.send(client) for client in ("a", "a", "b", "a", "b", "b")]
    started = clients.start_order(sent)
    for client in ("a", "b"):
        assert [group for group in started if group.request.client == client] == clients.groups[
            client
        ]
    assert [group.request.client for group in started] == ["a", "b"] * 3


def test_a_request_that_waits_because_of_its_client_does_not_become_overdue() -> None:
    """Others start before it all the time, as they have to: each client is served in rotation."""
    clients = make(max_bypasses=2)
    names = ("flood", "a", "b", "c", "d", "e")
    sent = [clients.send(client) for client in names for _ in range(4)]
    started = [group.request.client for group in clients.start_order(sent)]
    for count in (6, 12, 18, 24):
        assert sorted(started[count - 6 : count]) == sorted(names)


def test_priority_comes_before_a_fair_share() -> None:
    clients = make(policy="priority")
    late = clients.send("idle", priority=1)
    flood = [clients.send("flood", priority=0) for _ in range(4)]
    assert clients.start_order([late, *flood]) == [*flood, late]


def test_a_new_client_of_high_priority_is_not_ahead_because_one_of_low_priority_waits() -> None:
    clients = make(policy="priority", max_bypasses=10**6)
    steady = [clients.send("steady", priority=0) for _ in range(60)]
    clients.send("low", priority=9)
    clients.start_order(steady[:40])
    new = [clients.send("new", priority=0) for _ in range(20)]
    started = clients.start_order([*steady[40:], *new])
    for count in range(1, 40):
        num_new = sum(group.request.client == "new" for group in started[:count])
        assert abs(num_new - (count - num_new)) <= 2


def test_an_idle_client_saves_no_service_up() -> None:
    clients = make()
    clients.send("idle")
    clients.runner.run()
    for _ in range(20):
        clients.send("busy")
    clients.runner.run()
    busy = [clients.send("busy") for _ in range(8)]
    idle = [clients.send("idle") for _ in range(8)]
    started = clients.start_order([*busy, *idle])
    for count in range(1, 17):
        num_idle = sum(group.request.client == "idle" for group in started[:count])
        assert abs(num_idle - (count - num_idle)) <= 2


def test_a_client_cannot_lower_its_counter_by_leaving_and_returning() -> None:
    clients = make()
    for _ in range(3):
        clients.send("steady", max_tokens=1)
    clients.send("greedy", max_tokens=60)
    while clients.groups["greedy"][0].status is not FINISHED:
        clients.runner.step()
        while clients.num_waiting("steady") < 2:
            clients.send("steady", max_tokens=1)
    greedy = clients.send("greedy")
    started = clients.start_order([*clients.groups["steady"][-2:], greedy])
    assert started[-1] is greedy


def test_tokens_of_the_prefix_cache_are_not_charged_for() -> None:
    """A client whose prompts are cached gets more requests served for the same service."""
    blocks = BlockManager(CacheConfig(num_blocks=400, block_size=4))
    config = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=64, max_model_len=100)
    clients = Clients(Runner(Scheduler(config, blocks), Memory(4)))
    different = [clients.send("different", 33, 1) for _ in range(12)]
    same = [
        clients.runner.add(attrs.evolve(different[0].request, request_id=f"s{i}", client="same"))
        for i in range(12)
    ]
    started = clients.start_order([*different, *same])
    assert sum(group in same for group in started[:12]) >= 9


def test_a_queue_that_one_client_has_filled_is_open_to_others() -> None:
    clients = make(max_waiting=12)
    for _ in range(12):
        clients.send("flood")
    with pytest.raises(QueueFull, match="12 requests are waiting and max_waiting is 12"):
        clients.send("flood")
    for _ in range(6):
        clients.send("a")
    for client in ("flood", "a"):
        with pytest.raises(QueueFull):
            clients.send(client)
        with pytest.raises(QueueFull):
            clients.runner.scheduler.check_queue(client)
    for _ in range(4):
        clients.runner.scheduler.check_queue("b")
        clients.send("b")
    with pytest.raises(QueueFull):
        clients.send("b")
    with pytest.raises(UnservableRequest, match="client"):
        clients.runner.scheduler.check_queue(None)


def test_requests_that_the_caller_will_add_count_as_those_of_their_client() -> None:
    """As those of the engine whose grammars compile."""
    clients = make(max_waiting=12)
    check_queue = clients.runner.scheduler.check_queue
    check_queue("flood", ["flood"] * 11)
    with pytest.raises(QueueFull, match="12 requests are waiting"):
        check_queue("flood", ["flood"] * 12)
    check_queue("a", ["flood"] * 12)
    clients.send("a")
    with pytest.raises(QueueFull):
        check_queue("flood", ["flood"] * 100_000)
    check_queue("a", ["flood"] * 12)
    for others in ("flood", 3, [3]):
        with pytest.raises(UnservableRequest, match="others"):
            check_queue("a", others)


def test_a_large_request_is_bypassed_by_small_ones_of_other_clients_a_limited_number_of_times() -> (
    None
):
    """It needs nearly all blocks, and those of others never stop to use some."""
    clients = make(num_blocks=30, max_num_seqs=4, max_bypasses=5)
    for _ in range(6):
        clients.send("small", 8, 8)
    clients.runner.step()
    large = clients.send("large", 90, 4)
    num_before = sum(group.status is not WAITING for group in clients.groups["small"])
    while large.status is not FINISHED:
        while clients.num_waiting("small") < 4:
            clients.send("small", 8, 8)
        clients.runner.step()
        if large.status is WAITING:
            num_started = sum(group.status is not WAITING for group in clients.groups["small"])
            assert num_started - num_before <= 5
    assert outcome(large) == alone(large.request, 200)


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abcd"), st.sampled_from(["enter", "leave", "remove", "serve", "turn"])
        ),
        max_size=60,
    )
)
def test_the_counter_of_a_client_that_returns_never_falls_below_those_that_wait(
    operations: list[tuple[str, str]],
) -> None:
    shares = ClientShares()
    waiting: list[str] = []
    running: list[str] = []
    level = 0
    for count, (name, operation) in enumerate(operations):
        if operation == "enter":
            client = shares.enter_queue(name, 100.0 * count, count)
            # With priorities, one that waits behind others keeps its low counter.
            assert client.service >= level or name in waiting
            waiting.append(name)
        elif operation == "leave" and name in waiting:
            waiting.remove(name)
            running.append(name)
            shares.leave_queue(shares._clients[name])
        elif operation == "remove" and name in running:
            running.remove(name)
            shares.remove(shares._clients[name])
        elif operation == "serve" and name in running:
            shares._clients[name].service += 7
        elif operation == "turn" and name in waiting:
            shares.serve_in_turn(shares._clients[name])
        assert shares._level() >= level
        level = shares._level()
