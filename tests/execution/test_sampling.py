from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from minipaged.errors import RequestFailedError
from minipaged.execution.sampling import SamplingState
from minipaged.ops.base import HostArray, Penalties
from minipaged.params import SamplingParams
from minipaged.step import Admission, Fork

VOCAB = 12
EOS = (2, 3)


def state_of(*admissions: Admission) -> SamplingState[HostArray]:
    state: SamplingState[HostArray] = SamplingState(list, max_running=8, vocab_size=VOCAB)
    for admission in admissions:
        state.admit(admission)
    return state


def admission(
    row: int, params: SamplingParams, *, prompt: Sequence[int] = (5,), output: Sequence[int] = (), seed: int = 0
) -> Admission:
    return Admission(
        row=row,
        token_ids=array("i", [*prompt, *output]),
        prompt_length=len(prompt),
        num_computed=0,
        blocks=(0,),
        params=params,
        seed=seed,
        sample_index=0,
        stop_token_ids=frozenset(params.stop_token_ids).union(() if params.ignore_eos else EOS),
    )


def int32(*values: int) -> NDArray[np.int32]:
    return np.array(values, np.int32)


def uint32(*values: int) -> NDArray[np.uint32]:
    return np.array(values, np.uint32)


def penalties_of(state: SamplingState[HostArray], *rows: int) -> Penalties[HostArray] | None:
    return state.adjustments(state.select(int32(*rows)), int32(*([1] * len(rows))))[0]


def test_a_batch_holds_the_settings_of_its_rows_in_their_order() -> None:
    state = state_of(
        admission(4, SamplingParams(temperature=0.5, top_k=3, top_p=0.25, min_p=0.125, logprobs=2), seed=2**64 - 1),
        admission(1, SamplingParams(temperature=0), seed=7),
    )
    batch = state.batch(state.select(int32(1, 4)), uint32(10, 20))
    assert batch.temperature.tolist() == [0, 0.5]
    assert batch.top_k.tolist() == [VOCAB, 3]
    assert batch.top_p.tolist() == [1, 0.25]
    assert batch.min_p.tolist() == [0, 0.125]
    assert batch.seeds.tolist() == [7, 2**64 - 1]
    assert batch.positions.tolist() == [10, 20]
    assert batch.num_logprobs == 2
    assert not batch.all_greedy
    assert state.batch(state.select(int32(1)), uint32(10)).all_greedy
    assert state.batch(state.select(int32(1)), uint32(10)).num_logprobs == -1


@pytest.mark.parametrize("top_k", [0, -1, VOCAB, VOCAB + 1, 2**40])
def test_top_k_without_a_limit(top_k: int) -> None:
    state = state_of(admission(0, SamplingParams(top_k=top_k)))
    assert state.batch(state.select(int32(0)), uint32(1)).top_k.tolist() == [VOCAB]


def test_the_same_rows_with_another_sequence_in_one() -> None:
    rows = int32(0, 1)
    state = state_of(admission(0, SamplingParams(temperature=1)), admission(1, SamplingParams(presence_penalty=1)))
    assert state.batch(state.select(rows, 5), uint32(1, 1)).temperature.tolist() == [1, 1]
    assert penalties_of(state, 0, 1) is not None
    state.admit(admission(1, SamplingParams(temperature=0.5)))
    assert state.batch(state.select(rows, 5), uint32(2, 3)).temperature.tolist() == [1, 0.5]
    assert state.batch(state.select(rows, 5), uint32(2, 3)).positions.tolist() == [2, 3]
    assert penalties_of(state, 0, 1) is None


def test_settings_of_the_same_version_are_uploaded_once() -> None:
    uploads: list[Sequence[HostArray]] = []

    def upload(arrays: Sequence[HostArray]) -> list[HostArray]:
        uploads.append(arrays)
        return list(arrays)

    state: SamplingState[HostArray] = SamplingState(upload, max_running=8, vocab_size=VOCAB)
    state.admit(admission(0, SamplingParams()))
    state.admit(admission(1, SamplingParams()))
    for version, expected in ((1, 1), (1, 1), (2, 2), (None, 3), (None, 4), (2, 5)):
        state.select(int32(0, 1), version)
        assert len(uploads) == expected
    state.fork([Fork(0, 1)])
    state.select(int32(0, 1), 2)
    assert len(uploads) == 6


def test_a_fork_counts_its_own_token_in_place_of_the_latest() -> None:
    state = state_of(admission(0, SamplingParams(frequency_penalty=1), prompt=[1, 2]))
    state.append(int32(0), int32(7))
    state.append(int32(0), int32(8))
    state.fork([Fork(0, 1, 9), Fork(0, 2, 7), Fork(0, 3)])
    state.append(int32(2), int32(2))
    penalties = penalties_of(state, 0, 1, 2, 3)
    assert penalties is not None
    assert entries(penalties) == [
        {1: 0, 2: 0, 7: 1, 8: 1},
        {1: 0, 2: 0, 7: 1, 9: 1},
        {1: 0, 2: 1, 7: 2},
        {1: 0, 2: 0, 7: 1, 8: 1},
    ]


def entries(penalties: Penalties[HostArray]) -> list[dict[int, int]]:
    """Token id -> count of each row."""
    starts, token_ids, counts = (a.tolist() for a in (penalties.starts, penalties.token_ids, penalties.counts))
    assert starts[-1] == len(token_ids) == len(counts)
    rows = [dict(zip(token_ids[i:j], counts[i:j], strict=True)) for i, j in itertools.pairwise(starts)]
    assert sum(map(len, rows)) == len(token_ids), "a token has two entries"
    return rows


def test_penalties_count_the_output_and_mark_the_prompt() -> None:
    penalised = SamplingParams(repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=-1)
    state = state_of(admission(0, SamplingParams()), admission(3, penalised, prompt=[1, 1, 4], output=[4, 6]))
    state.append(int32(0, 3), int32(9, 6))
    state.append(int32(3), int32(1))
    penalties = penalties_of(state, 0, 3)
    assert penalties is not None
    assert penalties.rows.tolist() == [1]
    assert entries(penalties) == [{1: 1, 4: 1, 6: 2}]
    assert (penalties.repetition[0], penalties.presence[0], penalties.frequency[0]) == (1.5, 0.5, -1)


def test_counts_are_the_same_after_a_preemption() -> None:
    params = SamplingParams(frequency_penalty=1)
    appended = state_of(admission(0, params, prompt=[1, 2]))
    for token in (7, 7, 8):
        appended.append(int32(0), int32(token))
    readmitted = state_of(admission(0, params, prompt=[1, 2], output=[7, 7, 8]))
    first, second = penalties_of(appended, 0), penalties_of(readmitted, 0)
    assert first is not None
    assert second is not None
    assert entries(first) == entries(second) == [{1: 0, 2: 0, 7: 2, 8: 1}]


def test_penalties_of_several_rows_follow_each_other() -> None:
    params = SamplingParams(repetition_penalty=1.5)
    state = state_of(*(admission(row, params, prompt=range(row + 1)) for row in range(3)))
    penalties = penalties_of(state, 2, 0, 1)
    assert penalties is not None
    assert penalties.rows.tolist() == [0, 1, 2]
    assert entries(penalties) == [{0: 0, 1: 0, 2: 0}, {0: 0}, {0: 0, 1: 0}]
    state.append(int32(0, 1), int32(5, 0))  # what was handed out stays as it was
    assert entries(penalties) == [{0: 0, 1: 0, 2: 0}, {0: 0}, {0: 0, 1: 0}]
    later = penalties_of(state, 0, 1)
    assert later is not None
    assert entries(later) == [{0: 0, 5: 1}, {0: 1, 1: 0}]


def biases(
    state: SamplingState[HostArray], rows: Sequence[int], positions: Sequence[int]
) -> set[tuple[int, int, float]]:
    _, bias = state.adjustments(state.select(int32(*rows)), int32(*positions))
    if bias is None:
        return set()
    return set(zip(bias.rows.tolist(), bias.token_ids.tolist(), bias.values.tolist(), strict=True))


def test_logit_bias() -> None:
    state = state_of(
        admission(0, SamplingParams(logit_bias={4: 1.5, 5: -np.inf})),
        admission(1, SamplingParams()),
        admission(2, SamplingParams(logit_bias={4: -2.0})),
    )
    assert biases(state, [2, 1, 0], [1, 1, 1]) == {(0, 4, -2.0), (2, 4, 1.5), (2, 5, -np.inf)}
    assert biases(state, [1], [1]) == set()


def test_stop_tokens_are_forbidden_until_min_tokens() -> None:
    forbidden = {(0, token, -np.inf) for token in (*EOS, 9)}
    state = state_of(admission(0, SamplingParams(min_tokens=2, stop_token_ids=[9]), prompt=[5, 5, 5]))
    assert biases(state, [0], [3]) == forbidden
    assert biases(state, [0], [4]) == forbidden
    assert biases(state, [0], [5]) == set()


def test_min_tokens_counts_what_was_generated_before_a_preemption() -> None:
    params = SamplingParams(min_tokens=2, ignore_eos=True, stop_token_ids=[9])
    state = state_of(admission(0, params, prompt=[5, 5, 5], output=[6]))
    assert biases(state, [0], [4]) == {(0, 9, -np.inf)}
    assert biases(state, [0], [5]) == set()


def test_min_tokens_with_nothing_to_forbid() -> None:
    state = state_of(admission(0, SamplingParams(min_tokens=2, ignore_eos=True)))
    assert biases(state, [0], [1]) == set()


def zeros() -> NDArray[np.float32]:
    return np.zeros(VOCAB, np.float32)


def test_a_callback_sees_all_tokens_and_its_result_is_used() -> None:
    seen: list[list[int]] = []

    def callback(token_ids: Sequence[int], logits: NDArray[np.float32]) -> NDArray[np.float32]:
        seen.append(list(token_ids))
        logits[3] = 8
        return logits

    state = state_of(admission(5, SamplingParams(logits_callback=callback), prompt=[1, 2], output=[3]))
    assert state.select(int32(4, 5)).with_callback.tolist() == [1]
    assert state.call_back(5, zeros())[3] == 8
    state.append(int32(5), int32(3))
    state.call_back(5, zeros())
    assert seen == [[1, 2, 3], [1, 2, 3, 3]]


def test_a_callback_cannot_change_its_history() -> None:
    def callback(token_ids: Sequence[int], logits: NDArray[np.float32]) -> NDArray[np.float32]:
        assert list(token_ids) == [5]
        assert isinstance(token_ids, array)
        token_ids.append(11)
        return logits

    state = state_of(admission(0, SamplingParams(logits_callback=callback)))
    state.call_back(0, zeros())
    state.call_back(0, zeros())


@pytest.mark.parametrize(
    "returned",
    [
        np.arange(VOCAB),
        np.arange(VOCAB, dtype=np.float64),
        np.arange(VOCAB, dtype=np.float16),
        list(range(VOCAB)),
    ],
)
def test_a_callback_may_return_any_real_numbers(returned: NDArray[np.float32]) -> None:
    state = state_of(admission(0, SamplingParams(logits_callback=lambda token_ids, logits: returned)))
    adjusted = state.call_back(0, zeros())
    assert adjusted.dtype == np.float32
    assert adjusted.tolist() == list(range(VOCAB))


@pytest.mark.parametrize(
    "returned",
    [
        None,
        np.zeros(VOCAB + 1, np.float32),
        np.zeros((1, VOCAB), np.float32),
        np.zeros(VOCAB, np.complex64),
        ["a"] * VOCAB,
        1.0,
    ],
)
def test_a_callback_that_returns_something_else_fails(returned: NDArray[np.float32]) -> None:
    state = state_of(admission(0, SamplingParams(logits_callback=lambda token_ids, logits: returned)))
    with pytest.raises(RequestFailedError, match="logits callback"):
        state.call_back(0, zeros())


def test_a_double_beyond_float32_forbids_its_token() -> None:
    lowest = np.full(VOCAB, -1e300)

    def callback(token_ids: Sequence[int], logits: NDArray[np.float32]) -> NDArray[np.float32]:
        return lowest

    adjusted = state_of(admission(0, SamplingParams(logits_callback=callback))).call_back(0, zeros())
    assert np.isneginf(adjusted).all()


def test_what_a_callback_raises_is_the_cause() -> None:
    def callback(token_ids: Sequence[int], logits: NDArray[np.float32]) -> NDArray[np.float32]:
        raise KeyError("grammar")

    state = state_of(admission(0, SamplingParams(logits_callback=callback)))
    with pytest.raises(RequestFailedError, match="KeyError: 'grammar'") as caught:
        state.call_back(0, zeros())
    assert isinstance(caught.value.__cause__, KeyError)
