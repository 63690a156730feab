"""Whatever arrives, leaves and runs short: no request is lost, and each gets its own tokens."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from trencadis.kvcache import BlockManager, CacheConfig
from trencadis.scheduler import FinishReason, Request, Scheduler, SchedulerConfig, Sequence

MAX_LEN = 24
STOP = 3


def next_token(tokens: tuple[int, ...]) -> int:
    """A model: a token that depends on every token before it, and now and then stops."""
    return hash(tokens) % 17


def alone(request: Request) -> list[int]:
    """The output of a request with the machine to itself."""
    tokens = list(request.prompt_token_ids)
    output: list[int] = []
    while len(output) < request.max_tokens and len(tokens) < MAX_LEN:
        tokens.append(next_token(tuple(tokens)))
        output.append(tokens[-1])
        if output[-1] in request.stop_token_ids and len(output) >= request.min_tokens:
            break
    return output


class Machine(RuleBasedStateMachine):
    """Drives a scheduler whose cache is a dictionary from (block, offset) to the token there."""

    @initialize(
        num_blocks=st.integers(MAX_LEN // 4 + 2, 20),
        max_num_seqs=st.integers(1, 6),
        budget=st.integers(6, 20),
        sharing=st.booleans(),
    )
    def start(self, num_blocks: int, max_num_seqs: int, budget: int, sharing: bool) -> None:
        self.blocks = BlockManager(
            CacheConfig(num_blocks=num_blocks, block_size=4, enable_prefix_caching=sharing)
        )
        self.config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=MAX_LEN,
            max_waiting=100,
        )
        self.scheduler = Scheduler(self.config, self.blocks)
        self.memory: dict[tuple[int, int], int] = {}
        self.live: dict[str, Sequence] = {}
        self.names = 0

    @rule(
        prompt=st.lists(st.integers(0, 2), min_size=1, max_size=MAX_LEN - 1),
        max_tokens=st.integers(1, 12),
        min_tokens=st.integers(0, 2),
    )
    def arrive(self, prompt: list[int], max_tokens: int, min_tokens: int) -> None:
        self.names += 1
        request = Request(
            request_id=f"r{self.names}",
            prompt_token_ids=tuple(prompt),
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            stop_token_ids=frozenset({STOP}),
        )
        self.live[request.request_id] = self.scheduler.add(request)

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if self.live:
            name = data.draw(st.sampled_from(sorted(self.live)))
            assert self.scheduler.abort(name)
            assert self.live.pop(name).finish_reason is FinishReason.ABORT

    @rule()
    def step(self) -> None:
        output = self.scheduler.schedule()
        assert output.num_tokens <= self.config.max_num_batched_tokens
        for copy in output.copies:
            for offset in range(4):
                if (copy.src, offset) in self.memory:
                    self.memory[copy.dst, offset] = self.memory[copy.src, offset]
        sampled = {}
        for one in (*output.decodes, *output.prompts):
            context = self.read(one.block_table, one.start)
            for position, token in enumerate(one.token_ids, one.start):
                block = int(one.block_table[position // 4])
                assert block != 0, "the padding block is nobody's"
                self.memory[block, position % 4] = token
            if one.samples:
                # What the model sees is what the cache holds, not what the sequence believes.
                sampled[one.seq_id] = next_token((*context, *one.token_ids))
        for update in self.scheduler.update(output, sampled):
            if update.finish_reason is not None:
                sequence = self.live.pop(update.request_id)
                assert list(sequence.output_token_ids) == alone(sequence.request)

    def read(self, table: object, length: int) -> tuple[int, ...]:
        return tuple(self.memory[int(table[i // 4]), i % 4] for i in range(length))

    @invariant()
    def queues_hold_exactly_the_live_ones(self) -> None:
        if hasattr(self, "scheduler"):
            waiting, running = self.scheduler.num_waiting, self.scheduler.num_running
            assert waiting + running == len(self.live)
            assert running <= self.config.max_num_seqs

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for _ in range(40 * (len(self.live) + 1)):
            if not self.live:
                break
            self.step()
        assert not self.live, "every admitted request finishes"
        assert self.blocks.num_free_blocks == self.blocks.num_total_blocks


TestScheduler = Machine.TestCase
TestScheduler.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
