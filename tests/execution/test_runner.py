from __future__ import annotations

import gc
import math
import weakref
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import minipaged.execution.runner
from minipaged.config import EngineConfig
from minipaged.errors import DeviceError, RequestFailedError
from minipaged.execution.runner import Runner
from minipaged.ops.base import KVPool
from minipaged.ops.reference.numpy_ops import Array
from minipaged.ops.reference.ops import ReferenceOps
from minipaged.output import TokenLogprob
from minipaged.params import SamplingParams
from minipaged.step import (
    Admission,
    Chunk,
    Fork,
    Logprobs,
    StepPlan,
    StepResult,
    SuppliedToken,
    TableUpdate,
    Transfer,
)
from tests.execution.history_model import IS_NAN, RAISES, VOCAB, HistoryModel, greedy, history_cache, history_logits

B = 4
EOS = 2
MAX_MODEL_LEN = 40
MAX_RUNNING = 8
NUM_BLOCKS = 100

# Never the tokens that break the model.
SAFE = {RAISES: -math.inf, IS_NAN: -math.inf, VOCAB - 1: -math.inf}
GREEDY = SamplingParams(temperature=0, logit_bias=SAFE)


Callback = Callable[[Sequence[int], NDArray[np.float32]], NDArray[np.float32]]


class LateCopy:
    """A copy that is done when the test says so, or someone waits for it."""

    def __init__(self) -> None:
        self.is_done = False
        self.waited = False

    def done(self) -> bool:
        return self.is_done

    def wait(self) -> None:
        self.waited = self.is_done = True


class LateOps(ReferenceOps):
    """Copies at once but says so late."""

    def __init__(self) -> None:
        self.copies: list[LateCopy] = []

    def blocks_to_host(
        self, cache: KVPool[Array], host: NDArray[np.uint8], pairs: Sequence[tuple[int, int]]
    ) -> LateCopy:
        super().blocks_to_host(cache, host, pairs)
        self.copies.append(LateCopy())
        return self.copies[-1]


class Driver:
    """Runs plans on a runner whose rows own enough blocks for any length, in an order that no table shares."""

    def __init__(self, ops: ReferenceOps | None = None) -> None:
        ops = ops or ReferenceOps()
        self.model = HistoryModel()
        cache, host_cache = history_cache(ops, num_blocks=NUM_BLOCKS, block_size=B)
        ops.fill_blocks(cache, range(NUM_BLOCKS), np.nan)
        config = EngineConfig(max_running=MAX_RUNNING, block_size=B, debug=True)
        self.runner = Runner(
            ops,
            self.model,
            cache,
            host_cache,
            config,
            vocab_size=VOCAB,
            max_model_len=MAX_MODEL_LEN,
        )
        self.num_plans = 0

    @staticmethod
    def blocks(row: int) -> tuple[int, ...]:
        return tuple(NUM_BLOCKS - 1 - row - MAX_RUNNING * column for column in range(MAX_MODEL_LEN // B))

    def admission(
        self,
        row: int,
        token_ids: Sequence[int],
        params: SamplingParams = GREEDY,
        *,
        prompt_length: int | None = None,
        num_computed: int = 0,
        blocks: tuple[int, ...] | None = None,
        seed: int = 1,
        sample_index: int = 0,
    ) -> Admission:
        return Admission(
            row=row,
            token_ids=array("i", token_ids),
            prompt_length=len(token_ids) if prompt_length is None else prompt_length,
            num_computed=num_computed,
            blocks=self.blocks(row) if blocks is None else blocks,
            params=params,
            seed=seed,
            sample_index=sample_index,
            stop_token_ids=frozenset((EOS,)),
        )

    def run(self, plan: StepPlan) -> StepResult:
        """As the next one, with a `decode_version` of its own."""
        self.num_plans += 1
        result = self.runner.execute(replace(plan, id=self.num_plans, decode_version=self.num_plans))
        assert result.plan_id == self.num_plans
        rows = [*plan.decode_rows, *(chunk.row for chunk in plan.chunks)]
        assert [each.row for each in result.sequences] == rows
        return result

    def prefill(self, *admissions: Admission) -> StepResult:
        chunks = tuple(whole(admission) for admission in admissions)
        return self.run(StepPlan(0, admissions=admissions, chunks=chunks))

    def decode(self, *rows: int, steps: int = 1) -> list[list[int]]:
        """Tokens of each row."""
        results = [self.run(StepPlan(0, decode_rows=rows)) for _ in range(steps)]
        return [list(tokens) for tokens in zip(*(tokens_of(result) for result in results), strict=True)]


def tokens_of(result: StepResult) -> list[int]:
    """One for each row that samples or failed; -1: it failed."""
    return [-1 if each.failure else each.token_ids[0] for each in result.sequences if each.token_ids or each.failure]


def failures_of(result: StepResult) -> dict[int, Exception]:
    """By row."""
    return {each.row: each.failure for each in result.sequences if each.failure is not None}


def logprobs_of(result: StepResult) -> dict[int, Logprobs]:
    """By row."""
    return {each.row: each.logprobs[0] for each in result.sequences if each.logprobs}


def prompt_logprobs_of(result: StepResult) -> dict[int, tuple[tuple[TokenLogprob, ...], ...]]:
    """By row."""
    return {each.row: each.prompt_logprobs for each in result.sequences if each.prompt_logprobs}


def whole(admission: Admission, *, prompt_logprobs: bool = False) -> Chunk:
    start, end = admission.num_computed, len(admission.token_ids)
    return Chunk(admission.row, start, end - start, True, prompt_logprobs)


def generate(prompt: Sequence[int], params: SamplingParams, count: int, *, seed: int = 1) -> list[int]:
    """Alone, in a fresh runner."""
    driver = Driver()
    (first,) = tokens_of(driver.prefill(driver.admission(0, prompt, params, seed=seed)))
    return [first, *driver.decode(0, steps=count - 1)[0]]


# Tokens


def test_decodes_and_chunks_in_one_step() -> None:
    driver = Driver()
    short, long = [3, 1, 4], [7, 7, 1, 2, 9, 9, 8, 5, 6]
    result = driver.run(
        StepPlan(
            0,
            admissions=(driver.admission(5, short), driver.admission(2, long)),
            chunks=(Chunk(2, 0, 3, False, False), Chunk(5, 0, 3, True, False)),
        )
    )
    outputs = [tokens_of(result)]
    outputs.append(tokens_of(driver.run(StepPlan(0, decode_rows=(5,), chunks=(Chunk(2, 3, 5, False, False),)))))
    outputs.append(tokens_of(driver.run(StepPlan(0, decode_rows=(5,), chunks=(Chunk(2, 8, 1, True, False),)))))
    outputs.append(tokens_of(driver.run(StepPlan(0, decode_rows=(2, 5)))))
    assert [output[0] for output in outputs[:3]] + outputs[3][1:] == greedy(short, 4)
    assert [outputs[2][1], outputs[3][0]] == greedy(long, 2)


@pytest.mark.parametrize("length", [1, B - 1, B, B + 1, 2 * B + 1])
@pytest.mark.parametrize("chunk", [1, B - 1, B, B + 1])
def test_chunking_changes_nothing(length: int, chunk: int) -> None:
    driver, prompt = Driver(), [(3 * i + 1) % 19 for i in range(length)]
    admissions: tuple[Admission, ...] = (driver.admission(1, prompt),)
    for start in range(0, length, chunk):
        end = min(start + chunk, length)
        result = driver.run(
            StepPlan(0, admissions=admissions, chunks=(Chunk(1, start, end - start, end == length, False),))
        )
        assert len(tokens_of(result)) == (end == length)
        admissions = ()
    assert [*tokens_of(result), *driver.decode(1, steps=3)[0]] == greedy(prompt, 4)


def test_blocks_are_added_as_the_sequence_grows() -> None:
    driver = Driver()
    blocks = driver.blocks(0)
    tokens = tokens_of(driver.prefill(driver.admission(0, [1, 2, 3], blocks=blocks[:1])))
    rows = (0,)
    for position in range(3, 3 * B):
        updates = (TableUpdate(0, position // B, blocks[position // B]),) if position % B == 0 else ()
        tokens += tokens_of(driver.run(StepPlan(0, table_updates=updates, decode_rows=rows)))
    assert tokens == greedy([1, 2, 3], len(tokens))


def test_a_fork_shares_the_prompt_and_copies_what_it_writes() -> None:
    """The samples of a request: the fork is planned with the chunk that completes the prompt."""
    driver, prompt = Driver(), [5, 6, 7, 8, 9, 1]
    params = SamplingParams(temperature=1, logit_bias=SAFE, frequency_penalty=0.5, repetition_penalty=1.2)
    shared, own = driver.blocks(0)[:2], driver.blocks(1)[1]
    parent = driver.admission(0, prompt, params, blocks=shared)
    fork = Fork(0, 1, sample_index=1)
    first = tokens_of(driver.run(StepPlan(0, admissions=(parent,), forks=(fork,), chunks=(whole(parent),))))
    both = StepPlan(0, copies=((shared[1], own),), table_updates=(TableUpdate(1, 1, own),), decode_rows=(0, 1))
    parents, children = zip(tokens_of(driver.run(both)), *zip(*driver.decode(0, 1), strict=True), strict=True)
    assert [*first, *parents] == generate(prompt, params, 3)
    for known in range(2):
        history = [*prompt, *children[:known]]
        fresh = Driver()
        alone = fresh.prefill(fresh.admission(3, history, params, prompt_length=len(prompt), sample_index=1))
        assert tokens_of(alone) == [children[known]]


def calling_with(seen: list[list[int]]) -> Callback:
    def look(token_ids: Sequence[int], logits: NDArray[np.float32]) -> NDArray[np.float32]:
        seen.append(list(token_ids))
        return logits

    return look


def test_beams_fork_with_tokens_of_their_own_and_exchange_rows() -> None:
    """Each child goes on as a sequence that has had the parent's tokens and then its own, penalties included."""
    driver, seen = Driver(), list[list[int]]()
    prompts = ([5, 6, 7, 8, 9], [3, 3, 1])
    params = replace(GREEDY, frequency_penalty=1, repetition_penalty=1.5, logits_callback=calling_with(seen))
    driver.prefill(*(driver.admission(row, prompt, params) for row, prompt in enumerate(prompts)))
    latest = tokens_of(driver.run(StepPlan(0, decode_rows=(0, 1))))
    seen.clear()

    forks = (Fork(0, 1, 11), Fork(1, 0, 12), Fork(0, 2, 13), Fork(1, 3))
    # Rows 0 and 1 exchange their sequences and the blocks of those; the others get copies of the blocks.
    pairs = [(fork.parent, fork.child, column) for fork in forks if fork.child > 1 for column in range(3)]
    copied = tuple((driver.blocks(parent)[column], driver.blocks(child)[column]) for parent, child, column in pairs)
    updates = tuple(TableUpdate(child, column, driver.blocks(child)[column]) for _, child, column in pairs)
    plan = StepPlan(0, copies=copied, forks=forks, table_updates=updates, decode_rows=(0, 1, 2, 3))
    found = tokens_of(driver.run(plan))
    histories = dict(zip((0, 1, 2, 3), seen, strict=True))
    for fork in forks:
        prompt, history = prompts[fork.parent], histories[fork.child]
        assert history[: len(prompt)] == prompt
        assert len(history) == len(prompt) + 2
        assert fork.token is None or history[-1] == fork.token
        fresh = Driver()
        alone = fresh.admission(4, history, replace(params, logits_callback=None), prompt_length=len(prompt))
        assert tokens_of(fresh.prefill(alone)) == [found[fork.child]]
    assert histories[3][-1] == latest[1]


def test_a_supplied_token_takes_the_place_of_a_sampled_one() -> None:
    driver, seen = Driver(), list[list[int]]()
    params = replace(GREEDY, logprobs=1, frequency_penalty=1, logits_callback=calling_with(seen))
    admissions = driver.admission(0, [4, 5], params), driver.admission(1, [7, 8, 1])
    chunks = tuple(map(whole, admissions))
    first = driver.run(StepPlan(0, admissions=admissions, chunks=chunks, supplied=(SuppliedToken(0, 17),)))
    assert tokens_of(first) == [17, *greedy([7, 8, 1], 1)]
    assert not logprobs_of(first)
    second = driver.run(StepPlan(0, decode_rows=(0, 1), supplied=(SuppliedToken(1, 3), SuppliedToken(0, 16))))
    assert tokens_of(second) == [16, 3]
    assert driver.model.num_tokens == [5, 2]
    assert seen == []
    third = driver.run(StepPlan(0, decode_rows=(0, 1)))
    assert seen == [[4, 5, 17, 16]]
    fresh = Driver()
    alone = fresh.admission(2, seen[0], replace(params, logits_callback=None), prompt_length=2)
    assert tokens_of(third) == [
        *tokens_of(fresh.prefill(alone)),
        *greedy([7, 8, 1, *greedy([7, 8, 1], 1), 3], 1),
    ]


def test_a_supplied_token_does_not_hide_a_failure() -> None:
    driver = Driver()
    admission = driver.admission(0, [4, RAISES])
    plan = StepPlan(0, admissions=(admission,), chunks=(whole(admission),), supplied=(SuppliedToken(0, 1),))
    assert tokens_of(driver.run(plan)) == [-1]


def test_a_fork_of_a_failed_row_has_failed() -> None:
    driver = Driver()
    error = failures_of(driver.prefill(driver.admission(0, [RAISES]), driver.admission(1, [1])))[0]
    result = driver.run(StepPlan(0, forks=(Fork(0, 2), Fork(1, 0)), decode_rows=(2, 0)))
    assert failures_of(result) == {2: error}


def test_a_dropped_row_keeps_nothing_alive() -> None:
    def look(token_ids: Sequence[int], logits: NDArray[np.float32]) -> NDArray[np.float32]:
        return logits

    driver, callback = Driver(), weakref.ref(look)
    driver.prefill(driver.admission(0, [1, 2], calling(look)), driver.admission(1, [1, 2]))
    del look
    driver.run(StepPlan(0, forks=(Fork(0, 2),), drops=(0,), decode_rows=(2,)))
    driver.run(StepPlan(0, drops=(2,)))
    gc.collect()
    assert callback() is None
    with pytest.raises(AssertionError, match="row 0 decodes without an admission"):
        driver.run(StepPlan(0, decode_rows=(0,)))
    assert tokens_of(driver.prefill(driver.admission(0, [1, 2]))) == greedy([1, 2], 1)


params_drawn = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    top_k=st.sampled_from([0, 3]),
    top_p=st.sampled_from([1.0, 0.8]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.25]),
    min_tokens=st.sampled_from([0, 3]),
    logit_bias=st.just(SAFE),
)
jobs_drawn = st.lists(
    st.tuples(st.lists(st.integers(0, 19), min_size=1, max_size=9), params_drawn, st.integers(0, 2**64 - 1)),
    min_size=1,
    max_size=5,
)


@given(st.data())
def test_tokens_depend_on_the_own_request_alone(data: st.DataObject) -> None:
    """In any row, any order, with any neighbours, also when readmitted in the middle."""
    jobs = data.draw(jobs_drawn)
    rows = data.draw(st.permutations(range(MAX_RUNNING)))[: len(jobs)]
    driver = Driver()
    outputs: dict[int, list[int]] = {}
    for row, (prompt, params, seed) in zip(rows, jobs, strict=True):
        outputs[row] = tokens_of(driver.prefill(driver.admission(row, prompt, params, seed=seed)))
    for _ in range(4):
        order = data.draw(st.permutations(rows))
        moved = data.draw(st.sampled_from(rows))
        prompt, params, seed = jobs[rows.index(moved)]
        tokens = [*prompt, *outputs[moved]]
        admission = driver.admission(moved, tokens, params, prompt_length=len(prompt), seed=seed)
        decodes = tuple(row for row in order if row != moved)
        result = driver.run(StepPlan(0, admissions=(admission,), decode_rows=decodes, chunks=(whole(admission),)))
        for row, token in zip((*decodes, moved), tokens_of(result), strict=True):
            outputs[row].append(token)
    for row, (prompt, params, seed) in zip(rows, jobs, strict=True):
        assert outputs[row] == generate(prompt, params, 5, seed=seed)


def test_min_tokens_keeps_the_end_away() -> None:
    prompt = next([a, b] for a in range(19) for b in range(19) if greedy([a, b], 1) == [EOS])
    params = replace(GREEDY, min_tokens=1)
    assert generate(prompt, GREEDY, 2)[0] == EOS
    assert generate(prompt, params, 2)[0] != EOS


def test_a_plan_without_tokens_computes_nothing() -> None:
    driver = Driver()
    result = driver.run(StepPlan(0, poison=(1,), copies=((1, 2),)))
    assert driver.model.num_forwards == 0
    assert tokens_of(result) == []


# Blocks


def test_swapped_blocks_come_back_elsewhere() -> None:
    driver, prompt = Driver(), [1, 2, 3, 4, 5, 6]
    (first,) = tokens_of(driver.prefill(driver.admission(0, prompt)))
    old, new = driver.blocks(0)[:2], driver.blocks(7)[:2]
    out = driver.run(StepPlan(0, swap_out=(Transfer(11, ((old[0], 3), (old[1], 0))),)))
    assert out.finished_transfers == (11,)
    driver.run(StepPlan(0, poison=old))
    back = driver.admission(4, [*prompt, first], prompt_length=len(prompt), num_computed=len(prompt), blocks=new)
    result = driver.run(
        StepPlan(
            0, poison=new, swap_in=(Transfer(12, ((3, new[0]), (0, new[1]))),), admissions=(back,), decode_rows=(4,)
        )
    )
    assert result.finished_transfers == (12,)
    assert [first, *tokens_of(result)] == greedy(prompt, 2)


def test_a_late_transfer_is_reported_when_it_finishes() -> None:
    ops = LateOps()
    driver = Driver(ops)
    first = StepPlan(0, swap_out=(Transfer(1, ((0, 0),)), Transfer(2, ((1, 1),))))
    admission = driver.admission(0, [1, 2])
    result = driver.run(replace(first, admissions=(admission,), chunks=(whole(admission),)))
    assert result.finished_transfers == ()
    ops.copies[1].is_done = True
    assert driver.run(StepPlan(0, decode_rows=(0,))).finished_transfers == (2,)
    assert driver.run(StepPlan(0, decode_rows=(0,))).finished_transfers == ()
    assert not ops.copies[0].waited
    assert driver.run(StepPlan(0)).finished_transfers == (1,)  # nothing else to do: it waits
    assert ops.copies[0].waited
    assert driver.run(StepPlan(0)).finished_transfers == ()


# Failures


def test_a_failing_forward_fails_its_own_sequence() -> None:
    driver = Driver()
    good, bad, decoding = [1, 2, 3, 4, 5], [4, RAISES, 6], [9, 8]
    (first,) = tokens_of(driver.prefill(driver.admission(3, decoding)))
    admissions = (driver.admission(0, good), driver.admission(1, bad))
    plan = StepPlan(0, admissions=admissions, decode_rows=(3,), chunks=tuple(map(whole, reversed(admissions))))
    result = driver.run(plan)
    assert tokens_of(result) == [greedy([*decoding, first], 1)[0], -1, greedy(good, 1)[0]]
    assert list(failures_of(result)) == [1]
    assert isinstance(failures_of(result)[1], RequestFailedError)
    assert isinstance(failures_of(result)[1].__cause__, ValueError)

    # The next step may have been planned before the failure was known.
    num_tokens = len(driver.model.num_tokens)
    later = driver.run(StepPlan(0, decode_rows=(1, 3, 0)))
    assert tokens_of(later)[0] == -1
    assert failures_of(later) == failures_of(result)
    assert list(tokens_of(later)[1:]) == [greedy([*decoding, first], 2)[1], greedy(good, 2)[1]]
    assert driver.model.num_tokens[num_tokens:] == [2]

    # The row is as good as new for the next sequence.
    assert tokens_of(driver.prefill(driver.admission(1, good))) == greedy(good, 1)


def test_only_failed_rows_in_a_step() -> None:
    driver = Driver()
    driver.prefill(driver.admission(0, [RAISES]))
    num_forwards = driver.model.num_forwards
    result = driver.run(StepPlan(0, decode_rows=(0,)))
    assert (tokens_of(result), list(failures_of(result))) == ([-1], [0])
    assert driver.model.num_forwards == num_forwards


def test_a_chunk_that_fails_before_the_last() -> None:
    driver = Driver()
    admission = driver.admission(0, [1, RAISES, 3, 4])
    result = driver.run(StepPlan(0, admissions=(admission,), chunks=(Chunk(0, 0, 2, False, False),)))
    assert list(failures_of(result)) == [0]
    later = driver.run(StepPlan(0, chunks=(Chunk(0, 2, 2, True, False),)))
    assert (tokens_of(later), list(failures_of(later))) == ([-1], [0])


@pytest.mark.parametrize("error", [DeviceError("lost"), MemoryError(), KeyboardInterrupt()])
def test_fatal_errors_leave_the_runner(error: BaseException) -> None:
    driver = Driver()

    def fail() -> None:
        raise error

    driver.model.before_forward = fail
    with pytest.raises(type(error)):
        driver.prefill(driver.admission(0, [1]), driver.admission(1, [2]))
    assert driver.model.num_forwards == 1


def test_nan_logits_fail_their_own_sequence() -> None:
    driver = Driver()
    good, bad = [1, 2, 3], [4, IS_NAN]
    for params in (GREEDY, SamplingParams(temperature=0.9, top_p=0.5, frequency_penalty=1, logprobs=2)):
        result = driver.prefill(driver.admission(0, bad, params), driver.admission(1, good))
        assert tokens_of(result) == [-1, *greedy(good, 1)]
        assert list(failures_of(result)) == [0]
        assert isinstance(failures_of(result)[0], RequestFailedError)
        assert 0 not in logprobs_of(result)


def test_forbidding_every_token_fails_the_sequence() -> None:
    driver = Driver()
    params = SamplingParams(logit_bias=dict.fromkeys(range(VOCAB), -math.inf))
    result = driver.prefill(driver.admission(0, [1], params), driver.admission(1, [2]))
    assert tokens_of(result) == [-1, *greedy([2], 1)]
    assert list(failures_of(result)) == [0]


# Logits callbacks


def calling(callback: Callback) -> SamplingParams:
    return replace(GREEDY, logits_callback=callback)


def test_a_callback_chooses_and_sees_the_tokens_so_far() -> None:
    seen: list[list[int]] = []

    def count(token_ids: Sequence[int], logits: NDArray[np.float32]) -> NDArray[np.float32]:
        seen.append(list(token_ids))
        logits[len(token_ids)] = 100
        return logits

    driver = Driver()
    result = driver.prefill(driver.admission(0, [9, 9]), driver.admission(1, [7, 8, 1], calling(count)))
    assert tokens_of(result) == [*greedy([9, 9], 1), 3]
    assert driver.decode(1, 0, steps=2) == [[4, 5], greedy([9, 9], 3)[1:]]
    assert seen == [[7, 8, 1], [7, 8, 1, 3], [7, 8, 1, 3, 4]]


def test_a_callback_gets_adjusted_logits() -> None:
    seen: list[NDArray[np.float32]] = []

    def look(token_ids: Sequence[int], logits: NDArray[np.float32]) -> NDArray[np.float32]:
        seen.append(logits.copy())
        return logits

    params = SamplingParams(temperature=0.5, logit_bias={3: 1.5}, repetition_penalty=2, logits_callback=look)
    driver = Driver()
    driver.prefill(driver.admission(0, [1, 2], params))
    expected = history_logits([1, 2])
    expected[[1, 2]] = [x / 2 if x > 0 else x * 2 for x in expected[[1, 2]]]
    expected[3] += 1.5
    np.testing.assert_allclose(seen[0], expected, rtol=1e-6)


def test_a_failing_callback_fails_its_own_sequence() -> None:
    def fail(token_ids: Sequence[int], logits: NDArray[np.float32]) -> NDArray[np.float32]:
        raise LookupError("no such state")

    def wrong(token_ids: Sequence[int], logits: NDArray[np.float32]) -> NDArray[np.float32]:
        return logits[:-1]

    def nan(token_ids: Sequence[int], logits: NDArray[np.float32]) -> NDArray[np.float32]:
        return logits * np.float32(np.nan)

    def keep(token_ids: Sequence[int], logits: NDArray[np.float32]) -> NDArray[np.float32]:
        return logits

    driver = Driver()
    callbacks = [fail, keep, wrong, nan]
    admissions = [driver.admission(row, [row + 1, 5], calling(callback)) for row, callback in enumerate(callbacks)]
    result = driver.prefill(*admissions, driver.admission(4, [8, 5]))
    assert tokens_of(result) == [-1, *greedy([2, 5], 1), -1, -1, *greedy([8, 5], 1)]
    assert sorted(failures_of(result)) == [0, 2, 3]
    assert all(isinstance(error, RequestFailedError) for error in failures_of(result).values())
    assert isinstance(failures_of(result)[0].__cause__, LookupError)


# Log-probabilities


def log_softmax(token_ids: Sequence[int]) -> NDArray[np.float64]:
    logits = history_logits(token_ids).astype(np.float64)
    return np.asarray(logits - np.log(np.exp(logits).sum()))


def test_logprobs_for_those_that_ask() -> None:
    driver = Driver()
    result = driver.prefill(
        driver.admission(0, [1, 2]),
        driver.admission(1, [3, 4], replace(GREEDY, logprobs=3)),
        driver.admission(2, [5], replace(GREEDY, logprobs=0)),
    )
    assert sorted(logprobs_of(result)) == [1, 2]
    expected = log_softmax([3, 4])
    ranking = sorted(range(VOCAB), key=lambda token: -expected[token])[:3]
    assert logprobs_of(result)[1].chosen == pytest.approx(expected[tokens_of(result)[1]], abs=1e-5)
    assert [entry.id for entry in logprobs_of(result)[1].top] == ranking
    assert [entry.logprob for entry in logprobs_of(result)[1].top] == pytest.approx(list(expected[ranking]), abs=1e-5)
    assert logprobs_of(result)[2].top == ()


@pytest.mark.parametrize("chunk", [1, 2, 3, 7])
@pytest.mark.parametrize("held", [1, 2 * VOCAB, 2**20])
def test_prompt_logprobs(chunk: int, held: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(minipaged.execution.runner, "PROMPT_LOGPROBS_ELEMENTS", held)
    driver, prompt = Driver(), [1, 2, 3, 4, 5, 6, 7]
    admission = driver.admission(2, prompt, replace(GREEDY, prompt_logprobs=2))
    driver.prefill(driver.admission(0, [9]))
    entries: list[tuple[TokenLogprob, ...]] = []
    for start in range(0, len(prompt), chunk):
        end = min(start + chunk, len(prompt))
        plan = StepPlan(0, decode_rows=(0,), chunks=(Chunk(2, start, end - start, end == len(prompt), True),))
        result = driver.run(replace(plan, admissions=(admission,) if start == 0 else ()))
        found = prompt_logprobs_of(result)
        assert list(found) == ([2] if start + 1 < len(prompt) else [])
        entries += found.get(2, ())
    assert tokens_of(result)[1:] == greedy(prompt, 1)
    assert len(entries) == len(prompt) - 1
    for position, entry in enumerate(entries, start=1):
        expected = log_softmax(prompt[:position])
        ranking = sorted(range(VOCAB), key=lambda token: -expected[token])[:2]
        assert [e.id for e in entry] == [prompt[position], *ranking]
        assert [e.logprob for e in entry] == pytest.approx(list(expected[[prompt[position], *ranking]]), abs=1e-5)


def test_prompt_logprobs_stop_at_the_prompt() -> None:
    driver = Driver()
    admission = driver.admission(0, [1, 2, 3, 4], replace(GREEDY, prompt_logprobs=0), prompt_length=2)
    plan = StepPlan(0, admissions=(admission,), chunks=(whole(admission, prompt_logprobs=True),))
    (entries,) = prompt_logprobs_of(driver.run(plan)).values()
    assert [entry.id for (entry,) in entries] == [2]


def test_nan_in_prompt_logprobs_fails_the_sequence() -> None:
    driver = Driver()
    bad = driver.admission(0, [1, IS_NAN, 3], replace(GREEDY, prompt_logprobs=0))
    good = driver.admission(1, [4, 5])
    result = driver.run(StepPlan(0, admissions=(bad, good), chunks=(whole(bad, prompt_logprobs=True), whole(good))))
    assert tokens_of(result) == [-1, *greedy([4, 5], 1)]
    assert list(failures_of(result)) == [0]


# Debug mode


def broken_plans(driver: Driver) -> dict[str, StepPlan]:
    admission = driver.admission(1, [1, 2, 3])
    sharing = driver.admission(1, [1, 2, 3], blocks=driver.blocks(0))
    bare = driver.admission(1, [1, 2, 3], blocks=())
    everything = driver.admission(1, [1] * (MAX_MODEL_LEN + 1))
    return {
        "row 3 decodes without an admission": StepPlan(0, decode_rows=(3,)),
        "row 3 has a chunk without an admission": StepPlan(0, chunks=(Chunk(3, 0, 1, True, False),)),
        "row 3 gets a block without an admission": StepPlan(0, table_updates=(TableUpdate(3, 0, 1),)),
        "row 1 decodes with 0": StepPlan(0, admissions=(admission,), decode_rows=(1,)),
        "row 1: chunk from 1": StepPlan(0, admissions=(admission,), chunks=(Chunk(1, 1, 2, True, False),)),
        r"row 1: chunk \[0, 4\)": StepPlan(0, admissions=(admission,), chunks=(Chunk(1, 0, 4, True, False),)),
        r"row 1: chunk \[0, 0\)": StepPlan(0, admissions=(admission,), chunks=(Chunk(1, 0, 0, False, False),)),
        "has samples=False": StepPlan(0, admissions=(admission,), chunks=(Chunk(1, 0, 3, False, False),)),
        "computed twice": StepPlan(0, decode_rows=(0, 0)),
        "row 1 has no block for position 0": StepPlan(0, admissions=(bare,), chunks=(whole(bare),)),
        "two sequences write slot 2": StepPlan(0, admissions=(sharing,), decode_rows=(0,), chunks=(whole(sharing),)),
        "row 1 passes max_model_len": StepPlan(0, admissions=(everything,), chunks=(whole(everything),)),
        "nothing is left": StepPlan(0, admissions=(replace(admission, num_computed=3),)),
        "row 1 forks from row 3": StepPlan(0, forks=(Fork(3, 1),)),
        "two forks have the same child": StepPlan(0, forks=(Fork(0, 1), Fork(0, 1))),
        "row 2 replaces a token of the prompt": StepPlan(0, admissions=(admission,), forks=(Fork(1, 2, 5),)),
        "row 3 is dropped without": StepPlan(0, drops=(3,)),
        "row 1 is dropped as soon": StepPlan(0, forks=(Fork(0, 1),), drops=(1,)),
        "row 0 decodes without": StepPlan(0, drops=(0,), decode_rows=(0,)),
        "two sequences write slot 2 of block 99": StepPlan(0, forks=(Fork(0, 1),), decode_rows=(0, 1)),
        "row 0 is supplied with a token, but": StepPlan(0, supplied=(SuppliedToken(0, 1),)),
        "a row is supplied with two": StepPlan(
            0, decode_rows=(0,), supplied=(SuppliedToken(0, 1), SuppliedToken(0, 2))
        ),
        "longer than its 3": StepPlan(0, admissions=(replace(admission, prompt_length=4),)),
    }


@pytest.mark.parametrize("message", list(broken_plans(Driver())))
def test_a_broken_plan_is_refused(message: str) -> None:
    driver = Driver()
    driver.prefill(driver.admission(0, [1, 2]))
    with pytest.raises(AssertionError, match=message):
        driver.run(broken_plans(driver)[message])


def test_a_decode_version_that_stands_for_other_rows_is_refused() -> None:
    driver = Driver()
    driver.prefill(driver.admission(0, [1, 2]), driver.admission(1, [1, 2]))
    driver.runner.execute(StepPlan(0, decode_rows=(0, 1), decode_version=99))
    driver.runner.execute(StepPlan(0, decode_rows=(0, 1), decode_version=99))
    with pytest.raises(AssertionError, match="decode_version is 99 again"):
        driver.runner.execute(StepPlan(0, decode_rows=(1, 0), decode_version=99))
