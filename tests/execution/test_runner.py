from __future__ import annotations

import math
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
from minipaged.step import Admission, Chunk, StepPlan, StepResult, TableUpdate, Transfer
from tests.execution.history_model import IS_NAN, RAISES, VOCAB, HistoryModel, greedy, history_cache, history_logits

B = 4
MAX_MODEL_LEN = 40
MAX_RUNNING = 8
NUM_BLOCKS = 100

# Never the tokens that break the model.
SAFE = {RAISES: -math.inf, IS_NAN: -math.inf, VOCAB - 1: -math.inf}
GREEDY = SamplingParams(temperature=0, logit_bias=SAFE)


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
            eos_token_ids=(2,),
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
        )

    def run(self, plan: StepPlan) -> StepResult:
        self.num_plans += 1
        result = self.runner.execute(replace(plan, id=self.num_plans))
        assert result.plan_id == self.num_plans
        return result

    def prefill(self, *admissions: Admission) -> StepResult:
        chunks = tuple(whole(admission) for admission in admissions)
        return self.run(StepPlan(0, admissions=admissions, chunks=chunks))

    def decode(self, *rows: int, steps: int = 1) -> list[list[int]]:
        """Tokens of each row."""
        results = [self.run(StepPlan(0, decode_rows=rows)) for _ in range(steps)]
        return [list(tokens) for tokens in zip(*(result.token_ids for result in results), strict=True)]


def whole(admission: Admission, *, prompt_logprobs: bool = False) -> Chunk:
    start, end = admission.num_computed, len(admission.token_ids)
    return Chunk(admission.row, start, end - start, True, prompt_logprobs)


def generate(prompt: Sequence[int], params: SamplingParams, count: int, *, seed: int = 1) -> list[int]:
    """Alone, in a fresh runner."""
    driver = Driver()
    first = driver.prefill(driver.admission(0, prompt, params, seed=seed)).token_ids[0]
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
    outputs = [list(result.token_ids)]
    outputs.append(list(driver.run(StepPlan(0, decode_rows=(5,), chunks=(Chunk(2, 3, 5, False, False),))).token_ids))
    outputs.append(list(driver.run(StepPlan(0, decode_rows=(5,), chunks=(Chunk(2, 8, 1, True, False),))).token_ids))
    outputs.append(list(driver.run(StepPlan(0, decode_rows=(2, 5))).token_ids))
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
        assert len(result.token_ids) == (end == length)
        admissions = ()
    assert [*result.token_ids, *driver.decode(1, steps=3)[0]] == greedy(prompt, 4)


def test_blocks_are_added_as_the_sequence_grows() -> None:
    driver = Driver()
    blocks = driver.blocks(0)
    tokens = list(driver.prefill(driver.admission(0, [1, 2, 3], blocks=blocks[:1])).token_ids)
    rows = (0,)
    for position in range(3, 3 * B):
        updates = (TableUpdate(0, position // B, blocks[position // B]),) if position % B == 0 else ()
        tokens += driver.run(StepPlan(0, table_updates=updates, decode_rows=rows)).token_ids
    assert tokens == greedy([1, 2, 3], len(tokens))


def test_a_fork_shares_the_prompt_and_copies_what_it_writes() -> None:
    driver, prompt = Driver(), [5, 6, 7, 8, 9, 1]
    params = SamplingParams(temperature=1, logit_bias=SAFE)
    shared = driver.blocks(0)[:2]
    parent = driver.admission(0, prompt, params, blocks=shared)
    child = driver.admission(1, prompt, params, blocks=shared, num_computed=len(prompt) - 1, sample_index=1)
    first = driver.run(StepPlan(0, admissions=(parent, child), chunks=(whole(parent),))).token_ids
    own = driver.blocks(1)[1]
    result = driver.run(
        StepPlan(
            0,
            copies=((shared[1], own),),
            table_updates=(TableUpdate(1, 1, own),),
            decode_rows=(0,),
            chunks=(whole(child),),
        )
    )
    parents, children = driver.decode(0, 1)
    assert [*first, result.token_ids[0], *parents] == generate(prompt, params, 3)
    history = [*prompt, result.token_ids[1]]
    fresh = Driver()
    alone = fresh.prefill(fresh.admission(3, history, params, prompt_length=len(prompt), sample_index=1))
    assert list(alone.token_ids) == children


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
        outputs[row] = list(driver.prefill(driver.admission(row, prompt, params, seed=seed)).token_ids)
    for _ in range(4):
        order = data.draw(st.permutations(rows))
        moved = data.draw(st.sampled_from(rows))
        prompt, params, seed = jobs[rows.index(moved)]
        tokens = [*prompt, *outputs[moved]]
        admission = driver.admission(moved, tokens, params, prompt_length=len(prompt), seed=seed)
        decodes = tuple(row for row in order if row != moved)
        result = driver.run(StepPlan(0, admissions=(admission,), decode_rows=decodes, chunks=(whole(admission),)))
        for row, token in zip((*decodes, moved), result.token_ids, strict=True):
            outputs[row].append(token)
    for row, (prompt, params, seed) in zip(rows, jobs, strict=True):
        assert outputs[row] == generate(prompt, params, 5, seed=seed)


def test_min_tokens_keeps_the_end_away() -> None:
    eos = 2
    prompt = next([a, b] for a in range(19) for b in range(19) if greedy([a, b], 1) == [eos])
    params = replace(GREEDY, min_tokens=1)
    assert generate(prompt, GREEDY, 2)[0] == eos
    assert generate(prompt, params, 2)[0] != eos


def test_a_plan_without_tokens_computes_nothing() -> None:
    driver = Driver()
    result = driver.run(StepPlan(0, poison=(1,), copies=((1, 2),)))
    assert driver.model.num_forwards == 0
    assert list(result.token_ids) == []


# Blocks


def test_swapped_blocks_come_back_elsewhere() -> None:
    driver, prompt = Driver(), [1, 2, 3, 4, 5, 6]
    first = driver.prefill(driver.admission(0, prompt)).token_ids[0]
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
    assert [first, *result.token_ids] == greedy(prompt, 2)


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
    first = driver.prefill(driver.admission(3, decoding)).token_ids[0]
    admissions = (driver.admission(0, good), driver.admission(1, bad))
    plan = StepPlan(0, admissions=admissions, decode_rows=(3,), chunks=tuple(map(whole, reversed(admissions))))
    result = driver.run(plan)
    assert list(result.token_ids) == [greedy([*decoding, first], 1)[0], -1, greedy(good, 1)[0]]
    assert list(result.failures) == [1]
    assert isinstance(result.failures[1], RequestFailedError)
    assert isinstance(result.failures[1].__cause__, ValueError)

    # The next step may have been planned before the failure was known.
    num_tokens = len(driver.model.num_tokens)
    later = driver.run(StepPlan(0, decode_rows=(1, 3, 0)))
    assert later.token_ids[0] == -1
    assert later.failures == result.failures
    assert list(later.token_ids[1:]) == [greedy([*decoding, first], 2)[1], greedy(good, 2)[1]]
    assert driver.model.num_tokens[num_tokens:] == [2]

    # The row is as good as new for the next sequence.
    assert list(driver.prefill(driver.admission(1, good)).token_ids) == greedy(good, 1)


def test_only_failed_rows_in_a_step() -> None:
    driver = Driver()
    driver.prefill(driver.admission(0, [RAISES]))
    num_forwards = driver.model.num_forwards
    result = driver.run(StepPlan(0, decode_rows=(0,)))
    assert (list(result.token_ids), list(result.failures)) == ([-1], [0])
    assert driver.model.num_forwards == num_forwards


def test_a_chunk_that_fails_before_the_last() -> None:
    driver = Driver()
    admission = driver.admission(0, [1, RAISES, 3, 4])
    result = driver.run(StepPlan(0, admissions=(admission,), chunks=(Chunk(0, 0, 2, False, False),)))
    assert list(result.failures) == [0]
    later = driver.run(StepPlan(0, chunks=(Chunk(0, 2, 2, True, False),)))
    assert (list(later.token_ids), list(later.failures)) == ([-1], [0])


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
        assert list(result.token_ids) == [-1, *greedy(good, 1)]
        assert list(result.failures) == [0]
        assert isinstance(result.failures[0], RequestFailedError)
        assert 0 not in result.logprobs


def test_forbidding_every_token_fails_the_sequence() -> None:
    driver = Driver()
    params = SamplingParams(logit_bias=dict.fromkeys(range(VOCAB), -math.inf))
    result = driver.prefill(driver.admission(0, [1], params), driver.admission(1, [2]))
    assert list(result.token_ids) == [-1, *greedy([2], 1)]
    assert list(result.failures) == [0]


# Logits callbacks


Callback = Callable[[Sequence[int], NDArray[np.float32]], NDArray[np.float32]]


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
    assert list(result.token_ids) == [*greedy([9, 9], 1), 3]
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
    assert list(result.token_ids) == [-1, *greedy([2, 5], 1), -1, -1, *greedy([8, 5], 1)]
    assert sorted(result.failures) == [0, 2, 3]
    assert all(isinstance(error, RequestFailedError) for error in result.failures.values())
    assert isinstance(result.failures[0].__cause__, LookupError)


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
    assert sorted(result.logprobs) == [1, 2]
    expected = log_softmax([3, 4])
    ranking = sorted(range(VOCAB), key=lambda token: -expected[token])[:3]
    assert result.logprobs[1].chosen == pytest.approx(expected[result.token_ids[1]], abs=1e-5)
    assert [entry.id for entry in result.logprobs[1].top] == ranking
    assert [entry.logprob for entry in result.logprobs[1].top] == pytest.approx(list(expected[ranking]), abs=1e-5)
    assert result.logprobs[2].top == ()


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
        assert list(result.prompt_logprobs) == [2]
        entries += result.prompt_logprobs[2]
    assert result.token_ids[1:] == greedy(prompt, 1)
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
    (entries,) = driver.run(plan).prompt_logprobs.values()
    assert [entry.id for (entry,) in entries] == [2]


def test_nan_in_prompt_logprobs_fails_the_sequence() -> None:
    driver = Driver()
    bad = driver.admission(0, [1, IS_NAN, 3], replace(GREEDY, prompt_logprobs=0))
    good = driver.admission(1, [4, 5])
    result = driver.run(StepPlan(0, admissions=(bad, good), chunks=(whole(bad, prompt_logprobs=True), whole(good))))
    assert list(result.token_ids) == [-1, *greedy([4, 5], 1)]
    assert list(result.failures) == [0]


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
        "longer than its 3": StepPlan(0, admissions=(replace(admission, prompt_length=4),)),
    }


@pytest.mark.parametrize("message", list(broken_plans(Driver())))
def test_a_broken_plan_is_refused(message: str) -> None:
    driver = Driver()
    driver.prefill(driver.admission(0, [1, 2]))
    with pytest.raises(AssertionError, match=message):
        driver.run(broken_plans(driver)[message])
