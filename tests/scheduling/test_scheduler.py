"""The scheduler over symbolic KV: whatever is asked, in whatever order, each sequence computes what it would alone."""

from __future__ import annotations

import gc
import random
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Unpack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minipaged.config import EngineConfig, PreemptionMode
from minipaged.errors import PromptTooLongError
from minipaged.params import SamplingParams
from minipaged.scheduling.request import Request, Status
from minipaged.scheduling.request import Sequence as SequenceState
from minipaged.scheduling.scheduler import Scheduler
from minipaged.settings import EngineSettings
from minipaged.step import Logprobs, StepPlan
from tests.scheduling.simulated_runner import SimulatedRunner, alone, prompt_entry

BLOCK = 4
VOCAB = 50
STOP = frozenset({7})


@dataclass
class Bench:
    """A scheduler, a simulated runner and the plans between them."""

    config: EngineConfig
    num_blocks: int
    swap_blocks: int = 0
    delay: Callable[[], int] = lambda: 0
    tokens_per_decode: int = 1
    num_tokens: Callable[[], int] = lambda: 1
    stop: frozenset[int] = STOP
    requests: list[Request] = field(default_factory=list)
    plans: list[StepPlan] = field(default_factory=list)
    in_flight: deque[StepPlan] = field(default_factory=deque)

    def __post_init__(self) -> None:
        assert self.config.max_batched_tokens is not None, "there is no device to say how many"
        self.max_batched_tokens = self.config.max_batched_tokens
        self.scheduler = Scheduler(
            self.config,
            num_blocks=self.num_blocks,
            swap_blocks=self.swap_blocks,
            block_bytes=64,
            max_batched_tokens=self.max_batched_tokens,
            tokens_per_decode=self.tokens_per_decode,
        )
        self.runner = SimulatedRunner(
            num_blocks=self.num_blocks,
            swap_blocks=self.swap_blocks,
            block_size=self.config.block_size,
            vocab_size=VOCAB,
            delay=self.delay,
            num_tokens=self.num_tokens,
        )

    def submit(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int = 8,
        priority: int = 0,
        n: int = 1,
        namespace: str = "",
        prompt_logprobs: int | None = None,
    ) -> Request:
        request = Request(
            id=str(len(self.requests)),
            prompt=array("i", prompt),
            params=SamplingParams(n=n, max_tokens=max_tokens, prompt_logprobs=prompt_logprobs),
            seed=0,
            arrival=len(self.requests),
            stop_token_ids=self.stop,
            max_length=min(len(prompt) + max_tokens, self.num_blocks * self.config.block_size),
            priority=priority,
            namespace=namespace,
        )
        self.scheduler.submit(request)
        self.requests.append(request)
        return request

    def step(self) -> bool:
        """Plan ahead as far as overlap allows, then commit one step. False when nothing was done."""
        while len(self.in_flight) < (2 if self.config.overlap else 1):
            plan = self.scheduler.plan(0.0)
            if plan is None:
                break
            assert plan.num_tokens <= self.max_batched_tokens
            self.plans.append(plan)
            self.in_flight.append(plan)
        if not self.in_flight:
            return False
        self.scheduler.commit(self.runner.execute(self.in_flight.popleft()))
        return True

    def run(self, limit: int = 5_000) -> None:
        for _ in range(limit):
            if not self.step():
                break
        else:
            pytest.fail("the scheduler does not come to an end")
        assert not self.scheduler.has_work, "nothing is planned though there is work: a deadlock"
        self.check_idle()

    def check_idle(self) -> None:
        stats = self.scheduler.stats()
        assert stats.blocks.in_use == stats.host_blocks.in_use == self.scheduler.kv.host.num_pending == 0
        for counts in (stats.blocks, stats.host_blocks):
            assert counts.free + counts.cached == counts.total

    def check_outputs(self) -> None:
        for request in self.requests:
            if request.params.prompt_logprobs is not None:
                expected_entries = [prompt_entry(request.prompt, p) for p in range(1, len(request.prompt))]
                found_entries = request.prompt_logprobs
                if all(sequence.finish_reason != "abort" for sequence in request.sequences):
                    assert found_entries == expected_entries
                assert found_entries == expected_entries[: len(found_entries)]
            for sequence in request.sequences:
                assert sequence.status is Status.FINISHED
                expected = alone(request.prompt, sequence.index, VOCAB, self.stop, request.max_length)
                found = list(sequence.token_ids)
                if sequence.finish_reason == "abort":
                    assert found == expected[: len(found)]
                else:
                    assert found == expected
                    assert sequence.finish_reason == ("stop" if found[-1] in self.stop else "length")
                    assert sequence.stop_reason == (found[-1] if found[-1] in self.stop else None)


def config(**settings: Unpack[EngineSettings]) -> EngineConfig:
    defaults = EngineConfig(block_size=BLOCK, max_running=8, max_batched_tokens=16, debug=True)
    return replace(defaults, **settings)


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_every_sequence_computes_what_it_would_alone(data: st.DataObject) -> None:
    draw = data.draw
    rng = draw(st.randoms(use_true_random=False))
    max_running = draw(st.integers(1, 6))
    num_blocks = draw(st.integers(3, 24))
    tokens_per_decode = draw(st.sampled_from([1, 1, 2, 5, 11]))
    bench = Bench(
        config(
            max_running=max_running,
            max_batched_tokens=max_running + draw(st.integers(0, 20)),
            prefix_caching=draw(st.booleans()),
            overlap=draw(st.booleans()),
            preemption=draw(st.sampled_from(["auto", "swap", "recompute"])),
        ),
        num_blocks=num_blocks,
        swap_blocks=draw(st.sampled_from([0, 2, 5, 50])),
        delay=lambda: rng.choice([0, 0, 1, 3]),
        tokens_per_decode=tokens_per_decode,
        num_tokens=lambda: rng.randint(1, tokens_per_decode),
    )
    longest = num_blocks * BLOCK - 1
    shared = prompt(longest)
    for _ in range(draw(st.integers(1, 14))):
        action = draw(st.sampled_from(["submit", "submit", "submit", "step", "steps", "abort", "reset"]))
        if action == "submit":
            length = draw(st.integers(1, longest))
            own = draw(st.integers(0, length))
            tokens = shared[: length - own] + prompt(own, seed=draw(st.integers(0, 3)))
            bench.submit(
                tokens,
                max_tokens=draw(st.integers(1, 30)),
                priority=draw(st.integers(0, 2)),
                n=draw(st.integers(1, min(3, max_running))),
                namespace=draw(st.sampled_from(["", "", "tenant"])),
                prompt_logprobs=draw(st.sampled_from([None, None, 0])),
            )
        elif action == "step":
            bench.step()
        elif action == "steps":
            for _ in range(draw(st.integers(1, 12))):
                bench.step()
        elif action == "abort" and bench.requests:
            bench.scheduler.abort(draw(st.sampled_from(bench.requests)))
        elif action == "reset":
            bench.scheduler.reset_prefix_cache()
    bench.run()
    bench.check_outputs()


def test_300_random_requests_with_aborts_leave_nothing_behind() -> None:
    rng = random.Random(5)
    bench = Bench(
        config(max_running=16, max_batched_tokens=48),
        num_blocks=40,
        swap_blocks=30,
        delay=lambda: rng.choice([0, 2]),
    )
    for _ in range(300):
        length = rng.randint(1, 60)
        bench.submit(prompt(length, rng.randrange(4)), max_tokens=rng.randint(1, 40), n=rng.randint(1, 4))
        for _ in range(rng.randint(0, 3)):
            bench.step()
        if rng.random() < 0.3:
            bench.scheduler.abort(rng.choice(bench.requests))
    bench.run(20_000)
    bench.check_outputs()


@pytest.mark.parametrize("overlap", [False, True])
def test_pool_of_four_blocks_x_y_x(overlap: bool) -> None:
    bench = Bench(config(overlap=overlap), num_blocks=4)
    x, y = prompt(3 * BLOCK, 1), prompt(3 * BLOCK, 2)
    cached = []
    for tokens in (x, x, y, x):
        request = bench.submit(tokens, max_tokens=2)
        bench.run()
        cached.append(request.cached_tokens)
    bench.check_outputs()
    # The second X finds its first two blocks (the third holds its last token); Y needs all four blocks.
    assert cached == [0, 2 * BLOCK, 0, 0]


@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_prompts_of_whole_blocks_sent_twice_then_extended(blocks: int) -> None:
    bench = Bench(config(max_batched_tokens=64), num_blocks=32)
    tokens = prompt(blocks * BLOCK)
    first, second = bench.submit(tokens), bench.submit(tokens)
    bench.run()
    third = bench.submit(tokens)
    bench.run()
    fourth = bench.submit([*tokens, 1, 2, 3])
    bench.run()
    bench.check_outputs()
    # Submitted together, the second waits for what the first computes.
    assert [first.cached_tokens, second.cached_tokens] == [0, (blocks - 1) * BLOCK]
    assert third.cached_tokens == (blocks - 1) * BLOCK
    assert fourth.cached_tokens == blocks * BLOCK


@pytest.mark.parametrize("suffix", range(1, 2 * BLOCK + 2))
def test_cached_prefix_with_every_suffix_length(suffix: int) -> None:
    bench = Bench(config(), num_blocks=32)
    prefix = prompt(2 * BLOCK)
    bench.submit(prefix)
    bench.run()
    request = bench.submit([*prefix, *prompt(suffix, 9)])
    bench.run()
    bench.check_outputs()
    assert request.cached_tokens == 2 * BLOCK


def test_request_arriving_while_an_equal_prompt_is_mid_prefill() -> None:
    bench = Bench(config(max_batched_tokens=8, overlap=False), num_blocks=32)
    tokens = prompt(6 * BLOCK)
    bench.submit(tokens)
    bench.step()
    second = bench.submit(tokens)
    bench.run()
    bench.check_outputs()
    assert 0 < second.cached_tokens <= 5 * BLOCK


def test_of_many_equal_beginnings_only_one_is_computed() -> None:
    bench = Bench(config(max_batched_tokens=24), num_blocks=64)
    beginning = prompt(10 * BLOCK)
    for seed in range(8):
        bench.submit([*beginning, *prompt(3, seed)], max_tokens=2)
    bench.run()
    bench.check_outputs()
    assert bench.runner.prefilled == 10 * BLOCK + 8 * 3


def test_namespaces_share_nothing() -> None:
    bench = Bench(config(), num_blocks=32)
    tokens = prompt(3 * BLOCK)
    bench.submit(tokens, namespace="a")
    bench.run()
    other, same = bench.submit(tokens, namespace="b"), bench.submit(tokens, namespace="a")
    bench.run()
    assert (other.cached_tokens, same.cached_tokens) == (0, 2 * BLOCK)


@pytest.mark.parametrize("chunk", [1, BLOCK - 1, BLOCK, BLOCK + 1])
@pytest.mark.parametrize("warm", [False, True])
def test_chunked_prefill_of_every_length(chunk: int, warm: bool) -> None:
    for length in range(1, 3 * BLOCK + 1):
        bench = Bench(config(max_running=1, max_batched_tokens=chunk), num_blocks=16)
        if warm:
            bench.submit(prompt(length))
            bench.run()
        bench.submit(prompt(length))
        bench.run()
        bench.check_outputs()


def test_a_long_prompt_does_not_stall_decodes() -> None:
    bench = Bench(config(max_batched_tokens=12, overlap=False), num_blocks=64)
    short = bench.submit([1, 2, 3], max_tokens=40)
    bench.step()
    long = bench.submit(prompt(100), max_tokens=4)
    while len(long.sequences[0].token_ids) == 100:
        before = len(short.sequences[0].token_ids)
        bench.step()
        if short.sequences[0].status is not Status.FINISHED:
            assert len(short.sequences[0].token_ids) == before + 1
    assert len(bench.plans) > 100 // 12


@pytest.mark.parametrize("mode", ["swap", "recompute"])
@pytest.mark.parametrize("length", [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK + 1])
@pytest.mark.parametrize("overlap", [False, True])
def test_preemption_at_every_edge_of_a_block(mode: PreemptionMode, length: int, overlap: bool) -> None:
    """The victim has `length` tokens when an urgent request needs the whole pool."""
    bench = Bench(config(preemption=mode, overlap=overlap), num_blocks=6, swap_blocks=6)
    victim = bench.submit([1], max_tokens=20)
    while len(victim.sequences[0].token_ids) < length and bench.step():
        pass
    bench.submit(prompt(5 * BLOCK), max_tokens=3, priority=-1)
    bench.run()
    bench.check_outputs()
    stats = bench.scheduler.stats()
    assert (stats.preemptions_by_swap, stats.preemptions_by_recompute) == ((1, 0) if mode == "swap" else (0, 1))


@pytest.mark.parametrize("delay", [0, 1, 5])
def test_swap_space_of_two_blocks_with_ten_oversized_jobs(delay: int) -> None:
    bench = Bench(config(preemption="swap"), num_blocks=8, swap_blocks=2, delay=lambda: delay)
    for seed in range(10):
        bench.submit(prompt(6, seed), max_tokens=24)
    bench.run()
    bench.check_outputs()


def test_parallel_samples_share_the_prompt_and_copy_on_write() -> None:
    bench = Bench(config(max_batched_tokens=64, prefix_caching=False), num_blocks=32)
    request = bench.submit(prompt(2 * BLOCK + 2), n=4, max_tokens=6)
    bench.step()
    bench.step()
    assert bench.scheduler.stats().blocks.in_use < 4 * 3
    bench.run()
    bench.check_outputs()
    assert len({tuple(s.token_ids) for s in request.sequences}) == 4
    assert sum(len(plan.copies) for plan in bench.plans) == 3  # the last owner writes in place


def test_better_priority_is_served_first_and_worse_is_preempted() -> None:
    bench = Bench(config(max_running=1, max_batched_tokens=8, overlap=False), num_blocks=16, stop=frozenset())
    slow = bench.submit([1, 2], max_tokens=20, priority=5)
    bench.step()
    bench.step()
    later, urgent = bench.submit([3], max_tokens=2, priority=1), bench.submit([4], max_tokens=2, priority=0)
    finished: list[str] = []
    while bench.step():
        for request in (slow, later, urgent):
            if request.sequences[0].status is Status.FINISHED and request.id not in finished:
                finished.append(request.id)
    assert finished == [urgent.id, later.id, slow.id]
    bench.check_outputs()


def test_what_can_never_fit_is_refused_at_once() -> None:
    bench = Bench(config(), num_blocks=4)
    with pytest.raises(PromptTooLongError, match="leaves no room"):
        bench.submit(prompt(4 * BLOCK))
    assert bench.scheduler.num_waiting == 0
    bench.submit([1])
    bench.run()


def test_decode_version_changes_with_the_decode_rows_alone() -> None:
    bench = Bench(config(overlap=False), num_blocks=16, stop=frozenset())
    bench.submit([1], max_tokens=12)
    bench.submit([2], max_tokens=20)
    bench.run()
    versions: dict[int, tuple[int, ...]] = {}
    for plan in bench.plans:
        assert versions.setdefault(plan.decode_version, plan.decode_rows) == plan.decode_rows
    assert [len(rows) for rows in versions.values()] == [0, 2, 1]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("max_tokens", [1, 2, 3, BLOCK, 3 * BLOCK, 3 * BLOCK + 1])
def test_several_tokens_of_a_decode_end_at_the_limit(overlap: bool, max_tokens: int) -> None:
    many = 2 * BLOCK + 1
    bench = Bench(
        config(overlap=overlap),
        num_blocks=16,
        stop=frozenset(),
        tokens_per_decode=many,
        num_tokens=lambda: many,
    )
    bench.submit(prompt(BLOCK - 1), max_tokens=max_tokens)
    bench.run()
    bench.check_outputs()
    assert bench.scheduler.stats().generated_tokens == max_tokens


def test_a_stop_token_among_several_discards_the_rest() -> None:
    tokens = alone(prompt(3), 0, VOCAB, frozenset(), 3 + 8)[3:]
    stop = next(frozenset({token}) for token in tokens[2:6] if tokens.index(token) in range(2, 6))
    bench = Bench(config(overlap=False), num_blocks=16, stop=stop, tokens_per_decode=9, num_tokens=lambda: 9)
    request = bench.submit(prompt(3), max_tokens=20)
    bench.step()
    plan = bench.scheduler.plan(0.0)
    assert plan is not None
    result = bench.runner.execute(plan)
    (of_row,) = result.sequences
    committed = bench.scheduler.commit(result)
    ((_, num_tokens, _),) = committed.advanced
    assert 1 < num_tokens < len(of_row.token_ids) == 9
    bench.check_outputs()
    assert bench.scheduler.stats().generated_tokens == len(request.sequences[0].token_ids) - 3


def test_several_tokens_insert_all_blocks_that_they_fill() -> None:
    bench = Bench(config(overlap=False), num_blocks=16, stop=frozenset(), tokens_per_decode=11, num_tokens=lambda: 11)
    request = bench.submit(prompt(3), max_tokens=12)
    bench.run()
    again = bench.submit([*request.sequences[0].token_ids, 1], max_tokens=1)
    bench.run()
    # 15 tokens, all but the last of which have KV.
    assert again.cached_tokens == 14 // BLOCK * BLOCK


class Words:
    """A recipient whose text is the token ids; a stop string is one of them."""

    ended = False

    def __init__(self, stop: int) -> None:
        self.stop = stop
        self.added: list[int] = []

    def add_text(self, index: int, token_id: int) -> str | None:
        self.added.append(token_id)
        if token_id == self.stop + 1:
            raise LookupError("no such text")
        return str(token_id) if token_id == self.stop else None

    def deliver(self, sequence: SequenceState, num_tokens: int, logprobs: Sequence[Logprobs], now: float) -> None:
        raise AssertionError("the scheduler delivers nothing")

    def fail(self, error: BaseException) -> None:
        raise AssertionError("the scheduler tells nobody")


@pytest.mark.parametrize("num_tokens", [1, 9])
def test_a_stop_string_ends_the_sequence_where_its_token_is_committed(num_tokens: int) -> None:
    tokens = alone(prompt(3), 0, VOCAB, frozenset(), 3 + 8)[3:]
    bench = Bench(
        config(), num_blocks=16, stop=frozenset(), tokens_per_decode=num_tokens, num_tokens=lambda: num_tokens
    )
    request = bench.submit(prompt(3), max_tokens=20)
    stop = next(token for token in tokens[3:] if token - 1 not in tokens)
    request.recipient = words = Words(stop)
    bench.run()
    kept = tokens[: tokens.index(stop) + 1]
    assert list(request.output_of(request.sequences[0])) == words.added == kept
    assert (request.sequences[0].finish_reason, request.sequences[0].stop_reason) == ("stop", str(stop))


def test_what_the_text_of_a_request_raises_fails_its_sequence_alone() -> None:
    tokens = alone(prompt(3), 0, VOCAB, frozenset(), 3 + 8)[3:]
    bench = Bench(config(overlap=False), num_blocks=16, stop=frozenset())
    bad, good = bench.submit(prompt(3)), bench.submit(prompt(5, 1))
    bad.recipient = Words(tokens[2] - 1)
    failed: list[tuple[SequenceState, Exception]] = []
    while (plan := bench.scheduler.plan(0.0)) is not None:
        failed += bench.scheduler.commit(bench.runner.execute(plan)).failed
    ((sequence, error),) = failed
    assert sequence is bad.sequences[0]
    assert isinstance(error, LookupError)
    assert good.sequences[0].finish_reason == "length"


def test_samples_fork_without_a_copy_of_the_prompt() -> None:
    bench = Bench(config(max_batched_tokens=64), num_blocks=32)
    bench.submit(prompt(2 * BLOCK + 2), n=4, max_tokens=6)
    bench.run()
    bench.check_outputs()
    assert sum(len(plan.admissions) for plan in bench.plans) == 1
    assert [fork.sample_index for plan in bench.plans for fork in plan.forks] == [1, 2, 3]


@pytest.mark.parametrize("mode", ["swap", "recompute"])
@pytest.mark.parametrize("length", [5, 6, 7])
@pytest.mark.parametrize("overlap", [False, True])
def test_prompt_logprobs_of_a_prompt_that_is_preempted_half_way(
    mode: PreemptionMode, length: int, overlap: bool
) -> None:
    """An earlier sequence grows into the blocks of one that has computed a part of its prompt."""
    bench = Bench(
        config(preemption=mode, max_running=2, max_batched_tokens=length, overlap=overlap),
        num_blocks=11,
        swap_blocks=11,
        stop=frozenset(),
    )
    bench.submit(prompt(length, 1), max_tokens=12)
    victim = bench.submit(prompt(9 * BLOCK), max_tokens=3, prompt_logprobs=0)
    seen: set[int] = set()
    while max(seen, default=0) == 0 or victim.sequences[0].status is Status.RUNNING:
        assert bench.step()
        seen.add(len(victim.prompt_logprobs))
    assert 1 < max(seen) < 9 * BLOCK - 1
    bench.run()
    bench.check_outputs()
    stats = bench.scheduler.stats()
    assert (stats.preemptions_by_swap, stats.preemptions_by_recompute) == ((1, 0) if mode == "swap" else (0, 1))


def test_requests_that_end_while_they_wait_are_forgotten() -> None:
    bench = Bench(EngineConfig(block_size=BLOCK, max_running=1, max_batched_tokens=512), num_blocks=8)
    bench.submit([1] * 5)
    bench.scheduler.plan(0.0)
    bench.submit([1] * 5)  # waits before all others
    for _ in range(500):
        bench.scheduler.abort(bench.submit([1] * 5))
    bench.requests.clear()
    gc.collect()
    assert sum(isinstance(each, Request) for each in gc.get_objects()) < 200
