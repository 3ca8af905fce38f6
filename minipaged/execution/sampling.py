"""SamplingState: what the runner's rows need to choose tokens, as the arrays that `Ops` take."""

from __future__ import annotations

import copy
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Generic

import numpy as np
from numpy.typing import NDArray

from minipaged.errors import RequestFailedError
from minipaged.ops.base import Array, Bias, HostArray, Penalties, SamplingBatch
from minipaged.params import LogitsCallback, SamplingParams
from minipaged.step import Admission, Fork

Int32 = NDArray[np.int32]
Indices = NDArray[np.intp]


class _Penalised:
    """What penalties need to know of one row: the distinct tokens of prompt and output, in no particular order.

    The latest token of the output is kept apart until it is needed, since a fork may replace it.
    """

    def __init__(self, token_ids: Int32, prompt_length: int, params: SamplingParams) -> None:
        has_output = len(token_ids) > prompt_length
        self._latest = int(token_ids[-1]) if has_output else None
        settled = token_ids[:-1] if has_output else token_ids
        distinct, places = np.unique(settled, return_inverse=True)
        self.params = params
        self._token_ids = array("i", distinct.tolist())
        self._counts = array("i", np.bincount(places[prompt_length:], minlength=len(distinct)).tolist())
        self._places = {token_id: place for place, token_id in enumerate(self._token_ids)}

    def append(self, token_id: int) -> None:
        """Another token of the output."""
        if self._latest is not None:
            place = self._places.setdefault(self._latest, len(self._token_ids))
            if place == len(self._token_ids):
                self._token_ids.append(self._latest)
                self._counts.append(0)
            self._counts[place] += 1
        self._latest = token_id

    def fork(self, token: int | None) -> _Penalised:
        """A copy for another row, in which `token`, if given, stands in place of the latest one."""
        child = copy.copy(self)
        child._token_ids, child._counts, child._places = self._token_ids[:], self._counts[:], self._places.copy()
        if token is not None:
            child._latest = token
        return child

    def arrays(self) -> tuple[Int32, Int32]:
        """The tokens, and how often each occurs in the output."""
        token_ids, counts = np.array(self._token_ids, np.int32), np.array(self._counts, np.int32)
        if self._latest is None:
            return token_ids, counts
        place = self._places.get(self._latest)
        if place is None:
            return np.append(token_ids, np.int32(self._latest)), np.append(counts, np.int32(1))
        counts[place] += 1
        return token_ids, counts


@dataclass(frozen=True, slots=True)
class _Biased:
    """One row's additions to the logits."""

    token_ids: Int32
    values: NDArray[np.float32]
    stop_ids: Int32
    stops_from: int
    """Position from which on a stop token may be chosen."""


@dataclass(frozen=True, slots=True)
class _WithCallback:
    """One row's logits callback and the tokens it is to see."""

    callback: LogitsCallback
    token_ids: array[int]

    def fork(self, token: int | None) -> _WithCallback:
        """A copy for another row, in which `token`, if given, stands in place of the latest one."""
        token_ids = self.token_ids[:]
        if token is not None:
            token_ids[-1] = token
        return _WithCallback(self.callback, token_ids)


@dataclass(frozen=True, slots=True)
class Selection(Generic[Array]):
    """N rows that sample, and what of them stays the same from step to step; indices count within the N."""

    version: int | None
    rows: Int32
    settings: Sequence[Array]
    """Temperature to sample_index of a SamplingBatch."""
    num_logprobs: int
    all_greedy: bool
    penalised: Indices
    biased: Indices
    with_callback: Indices


class SamplingState(Generic[Array]):
    """Settings and history of every row, in arrays that are gathered by row numbers.

    A row costs the same in each step at any context length. A row with penalties keeps its distinct tokens, until it is
    dropped or taken by the next sequence.
    """

    def __init__(
        self,
        upload_together: Callable[[Sequence[HostArray]], list[Array]],
        *,
        max_running: int,
        vocab_size: int,
    ) -> None:
        self._upload_together = upload_together
        self._vocab_size = vocab_size
        self._temperature = np.zeros(max_running, np.float32)
        self._top_k = np.zeros(max_running, np.int32)
        self._top_p = np.ones(max_running, np.float32)
        self._min_p = np.zeros(max_running, np.float32)
        self._seeds = np.zeros(max_running, np.uint64)
        self._sample_index = np.zeros(max_running, np.uint32)
        self._settings = (self._temperature, self._top_k, self._top_p, self._min_p, self._seeds, self._sample_index)
        self._num_logprobs = np.full(max_running, -1, np.int32)
        self._penalised: dict[int, _Penalised] = {}
        self._biased: dict[int, _Biased] = {}
        self._with_callback: dict[int, _WithCallback] = {}
        self._selection: Selection[Array] | None = None

    def admit(self, admission: Admission) -> None:
        """A sequence takes a row; its history is rebuilt from its tokens."""
        row, params = admission.row, admission.params
        self._selection = None
        self._temperature[row] = params.temperature
        self._top_k[row] = params.top_k if 0 < params.top_k < self._vocab_size else self._vocab_size
        self._top_p[row] = params.top_p
        self._min_p[row] = params.min_p
        self._seeds[row] = admission.seed
        self._sample_index[row] = admission.sample_index
        self._num_logprobs[row] = -1 if params.logprobs is None else params.logprobs

        self.drop(row)
        if params.has_penalties:
            token_ids = np.frombuffer(admission.token_ids, np.int32)
            self._penalised[row] = _Penalised(token_ids, admission.prompt_length, params)
        if params.logit_bias or params.min_tokens:
            self._biased[row] = _bias_of(admission)
        if params.logits_callback is not None:
            self._with_callback[row] = _WithCallback(params.logits_callback, admission.token_ids[:])

    def fork(self, forks: Sequence[Fork]) -> None:
        """Rows go on from what other rows have, all of which is read before any of it is changed."""
        self._selection = None
        parents, children = [fork.parent for fork in forks], [fork.child for fork in forks]
        for of_rows in (*self._settings, self._num_logprobs):
            of_rows[children] = of_rows[parents]
        self._sample_index[children] = [fork.sample_index for fork in forks]
        penalised = {f.child: self._penalised[f.parent].fork(f.token) for f in forks if f.parent in self._penalised}
        biased = {f.child: self._biased[f.parent] for f in forks if f.parent in self._biased}
        called = {
            f.child: self._with_callback[f.parent].fork(f.token) for f in forks if f.parent in self._with_callback
        }
        for child in children:
            self.drop(child)
        self._penalised |= penalised
        self._biased |= biased
        self._with_callback |= called

    def drop(self, row: int) -> None:
        """Forget the history of a row."""
        self._penalised.pop(row, None)
        self._biased.pop(row, None)
        self._with_callback.pop(row, None)

    def append(self, rows: Int32, token_ids: Int32) -> None:
        """These tokens were chosen, one per row."""
        if not self._penalised and not self._with_callback:
            return
        for row, token_id in zip(rows.tolist(), token_ids.tolist(), strict=True):
            if row in self._penalised:
                self._penalised[row].append(token_id)
            if row in self._with_callback:
                self._with_callback[row].token_ids.append(token_id)

    def select(self, rows: Int32, version: int | None = None) -> Selection[Array]:
        """The rows [N] whose next tokens are to be chosen. What has the same version is uploaded once."""
        if version is None or self._selection is None or self._selection.version != version:
            self._selection = Selection(
                version=version,
                rows=rows,
                settings=self._upload_together([of_rows[rows] for of_rows in self._settings]),
                num_logprobs=int(self._num_logprobs[rows].max(initial=-1)),
                all_greedy=not self._temperature[rows].any(),
                penalised=_indices_in(rows, self._penalised),
                biased=_indices_in(rows, self._biased),
                with_callback=_indices_in(rows, self._with_callback),
            )
        return self._selection

    @staticmethod
    def batch(selection: Selection[Array], positions: Array) -> SamplingBatch[Array]:
        """The settings of rows whose tokens at positions, uint32 [N], are to be chosen."""
        temperature, top_k, top_p, min_p, seeds, sample_index = selection.settings
        return SamplingBatch(
            temperature,
            top_k,
            top_p,
            min_p,
            seeds,
            sample_index,
            positions,
            num_logprobs=selection.num_logprobs,
            all_greedy=selection.all_greedy,
        )

    def adjustments(
        self, selection: Selection[Array], positions: Int32
    ) -> tuple[Penalties[Array] | None, Bias[Array] | None]:
        """Penalties and biases of rows whose tokens at positions [N] are to be chosen, uploaded by one copy."""
        penalties, bias = self._penalties(selection), self._bias(selection, positions)
        if not penalties and not bias:
            return None, None
        uploaded = iter(self._upload_together([*penalties, *bias]))
        return (
            Penalties(*islice(uploaded, len(penalties))) if penalties else None,
            Bias(*islice(uploaded, len(bias))) if bias else None,
        )

    def _penalties(self, selection: Selection[Array]) -> list[HostArray]:
        """The fields of Penalties; nothing where no row has any."""
        indices = selection.penalised
        if indices.size == 0:
            return []
        penalised = [self._penalised[row] for row in selection.rows[indices].tolist()]
        token_ids, counts = zip(*(state.arrays() for state in penalised), strict=True)
        settings = [
            (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
            for params in (state.params for state in penalised)
        ]
        repetition, presence, frequency = np.array(settings, np.float32).T
        return [
            indices.astype(np.int32),
            np.cumsum([0, *map(len, token_ids)], dtype=np.int32),
            np.concatenate(token_ids),
            np.concatenate(counts),
            repetition,
            presence,
            frequency,
        ]

    def _bias(self, selection: Selection[Array], positions: Int32) -> list[HostArray]:
        """The fields of Bias: logit_bias, and -inf for stop tokens before min_tokens; nothing where there is none."""
        indices: list[int] = []
        token_ids: list[Int32] = []
        values: list[NDArray[np.float32]] = []
        for index in selection.biased.tolist():
            biased = self._biased[int(selection.rows[index])]
            indices.append(index)
            token_ids.append(biased.token_ids)
            values.append(biased.values)
            if positions[index] < biased.stops_from:
                indices.append(index)
                token_ids.append(biased.stop_ids)
                values.append(np.full(len(biased.stop_ids), -np.inf, np.float32))
        if sum(map(len, token_ids)) == 0:
            return []
        of_entries = np.repeat(np.array(indices, np.int32), [len(ids) for ids in token_ids])
        return [of_entries, np.concatenate(token_ids), np.concatenate(values)]

    def call_back(self, row: int, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """What the row's callback makes of its logits [vocab_size], which it may change.

        Raises `RequestFailedError` if the callback raises, or returns anything else than real numbers [vocab_size].
        """
        state = self._with_callback[row]
        try:
            returned = np.asarray(state.callback(state.token_ids[:], logits))
            with np.errstate(over="ignore"):  # a large negative float64 is -inf
                adjusted = returned.astype(np.float32, casting="same_kind")
        except BaseException as error:  # SystemExit too: it is the callback's, and this is not the main thread
            raise RequestFailedError(f"The logits callback failed: {type(error).__name__}: {error}") from error
        if adjusted.shape != logits.shape:
            raise RequestFailedError(
                f"The logits callback returned an array of shape {adjusted.shape}; expected {logits.shape}, "
                "a logit for each token of the vocabulary."
            )
        return adjusted

    def num_logprobs(self, rows: Int32) -> Int32:
        """How many most likely tokens each row asked for; -1: no log-probabilities at all."""
        return self._num_logprobs[rows]


def _bias_of(admission: Admission) -> _Biased:
    params = admission.params
    return _Biased(
        token_ids=np.array(list(params.logit_bias.keys()), np.int32),
        values=np.array(list(params.logit_bias.values()), np.float32),
        stop_ids=np.array(sorted(admission.stop_token_ids), np.int32),
        stops_from=admission.prompt_length + params.min_tokens,
    )


def _indices_in(rows: Int32, states: dict[int, _Penalised] | dict[int, _Biased] | dict[int, _WithCallback]) -> Indices:
    if not states:
        return np.empty(0, np.intp)
    return np.array([index for index, row in enumerate(rows.tolist()) if row in states], np.intp)
