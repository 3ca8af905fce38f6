"""The rules by which tokens are chosen from logits: the specification for every backend.

A row's result depends on that row alone, to the bit: rows are only ever combined elementwise, and what sums over the
vocabulary is computed one row at a time, in token-id order.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from minipaged.ops.base import Bias, Penalties, Sampled, SamplingBatch
from minipaged.ops.philox import uniforms

Array = NDArray[np.generic]
Logits = NDArray[np.float32]
Ids = NDArray[np.intp]

NUCLEUS_GUESS = 256
"""Tokens sorted at first for top-p. Usually they reach it, so that the rest of the vocabulary need not be sorted."""


@np.errstate(invalid="ignore", over="ignore")
def adjust_logits(logits: Logits, penalties: Penalties[Array] | None, bias: Bias[Array] | None) -> Logits:
    """A copy of logits [N, vocab_size] with penalties, then bias, applied.

    Repetition comes first: where a token occurs in prompt or output, a positive logit is divided by it and a negative
    one multiplied (arXiv:1909.05858). Then `frequency` times its count in the output and, if that is not 0,
    `presence` are subtracted. Biases of one token add up.
    """
    adjusted = logits.copy()
    if penalties is not None:
        starts = penalties.starts.astype(np.intp)
        of_entry = np.repeat(np.arange(len(penalties.rows)), starts[1:] - starts[:-1])
        repetition, presence, frequency = (
            per_row.astype(np.float32)[of_entry]
            for per_row in (penalties.repetition, penalties.presence, penalties.frequency)
        )
        counts = penalties.counts.astype(np.float32)
        entries = (penalties.rows.astype(np.intp)[of_entry], penalties.token_ids.astype(np.intp))
        x = adjusted[entries]
        x = np.where(x > 0, x / repetition, x * repetition)
        adjusted[entries] = x - frequency * counts - presence * (counts > 0)
    if bias is not None:
        index = (bias.rows.astype(np.intp), bias.token_ids.astype(np.intp))
        np.add.at(adjusted, index, bias.values.astype(np.float32))
    return adjusted


@np.errstate(invalid="ignore", over="ignore", under="ignore")
def sample(logits: Logits, raw_logits: Logits, batch: SamplingBatch[Array]) -> Sampled:
    """Choose one token per row of logits [N, vocab_size].

    With temperature 0 it is the largest logit, the smallest id among equals. Else each of these narrows what the one
    before it left, and among equal logits the smaller ids stay:

    1. probabilities are softmax(logits / temperature);
    2. top_k keeps the k most likely tokens;
    3. top_p keeps the smallest number of most likely tokens whose share of the probability left reaches top_p;
    4. min_p drops tokens less likely than min_p times the most likely one;
    5. with one uniform number u per row (see `philox.uniforms`), the choice is the first token in token-id order at
       which the cumulative share of the probability left exceeds u.

    A logit of +inf counts as the largest float32. Log-probabilities are log-softmax(raw_logits); they are NaN, and the
    top ids -1, where no token was chosen or the raw logits hold NaN or nothing above -inf.
    """
    num_rows = len(logits)
    best = logits.argmax(axis=1)
    peaks = logits[np.arange(num_rows), best]
    token_ids = best.astype(np.int32)
    if not batch.all_greedy:
        temperature, top_p, min_p = (x.astype(np.float32) for x in (batch.temperature, batch.top_p, batch.min_p))
        top_k = batch.top_k.astype(np.int32)
        drawn = np.flatnonzero((temperature > 0) & (peaks > -np.inf))
        u = uniforms(
            batch.seeds.astype(np.uint64)[drawn],
            batch.sample_index.astype(np.uint32)[drawn],
            batch.positions.astype(np.uint32)[drawn],
        )
        for number, row in zip(u, drawn, strict=True):
            token_ids[row] = _draw(logits[row], temperature[row], int(top_k[row]), top_p[row], min_p[row], number)

    # argmax finds a NaN if there is one, so the peak tells all but whether anything finite stands beside +inf.
    for row in np.flatnonzero(~np.isfinite(peaks)):
        if not np.isposinf(peaks[row]) or not np.isfinite(logits[row]).any():
            token_ids[row] = -1

    if batch.num_logprobs < 0:
        return Sampled(token_ids, None, None, None)
    return Sampled(token_ids, *logprobs(raw_logits, token_ids, batch.num_logprobs))


@np.errstate(invalid="ignore", over="ignore", under="ignore", divide="ignore")
def logprobs(
    raw_logits: Logits, token_ids: NDArray[np.int32], num_top: int
) -> tuple[NDArray[np.float32], NDArray[np.int32], NDArray[np.float32]]:
    """log-softmax of raw_logits [N, vocab_size] at token_ids, [N], and the most likely tokens' ids and theirs.

    The last two are [N, min(num_top, vocab_size)], most likely first, ties by smaller id. A row holds NaN and -1 where
    its token id is -1 or its logits hold NaN or nothing above -inf.
    """
    num_rows, vocab_size = raw_logits.shape
    num_top = min(num_top, vocab_size)
    chosen = np.full(num_rows, np.nan, np.float32)
    top_ids = np.full((num_rows, num_top), -1, np.int32)
    top_logprobs = np.full((num_rows, num_top), np.nan, np.float32)
    for row, token_id in enumerate(token_ids):
        logits = np.minimum(raw_logits[row], np.finfo(np.float32).max)
        peak = logits.max()
        if token_id < 0 or not np.isfinite(peak):
            continue
        shifted = logits - peak
        normaliser = np.log(np.exp(shifted).sum(dtype=np.float64))
        chosen[row] = shifted[token_id] - normaliser
        top_ids[row] = _most_likely(logits, num_top)
        top_logprobs[row] = shifted[top_ids[row]] - normaliser
    return chosen, top_ids, top_logprobs


def _draw(
    logits: Logits, temperature: np.float32, top_k: int, top_p: np.float32, min_p: np.float32, u: np.float64
) -> int:
    """One token of one row [vocab_size]."""
    logits = np.minimum(logits, np.finfo(np.float32).max)
    ids = np.arange(len(logits))  # those left, in id order, as in `logits` and `weights`
    if top_k < len(logits):
        ids = _largest(logits, top_k)
        logits = logits[ids]
    weights = np.exp((logits - logits.max()) / temperature)  # 1 for the most likely token
    if top_p < 1:
        kept = _nucleus(logits, weights, float(top_p))
        ids, weights = ids[kept], weights[kept]
    if min_p > 0:
        kept = np.flatnonzero(weights >= min_p)
        ids, weights = ids[kept], weights[kept]
    cumulative = np.cumsum(weights, dtype=np.float64)
    return int(ids[np.searchsorted(cumulative, u * cumulative[-1], side="right")])


def _nucleus(logits: Logits, weights: NDArray[np.float32], top_p: float) -> Ids:
    """The smallest number of most likely tokens whose weights reach top_p of all, in id order."""
    size = min(NUCLEUS_GUESS, len(logits))
    target = top_p * np.cumsum(weights, dtype=np.float64)[-1]
    while True:
        ids = _most_likely(logits, size)
        cumulative = np.cumsum(weights[ids], dtype=np.float64)
        if cumulative[-1] >= target or size == len(logits):
            return np.sort(ids[: np.searchsorted(cumulative, target) + 1])
        size = min(16 * size, len(logits))


def _most_likely(logits: Logits, count: int) -> Ids:
    """The `count` largest, in descending order, ties by smaller id."""
    ids = _largest(logits, count)
    return ids[np.argsort(-logits[ids], kind="stable")]


def _largest(logits: Logits, count: int) -> Ids:
    """The `count` largest, among equals those of smaller id, in id order."""
    if count == 0:
        return np.empty(0, np.intp)
    threshold = np.partition(logits, -count)[-count]
    keep = logits > threshold
    equal = np.flatnonzero(logits == threshold)
    keep[equal[: count - np.count_nonzero(keep)]] = True
    return np.flatnonzero(keep)
