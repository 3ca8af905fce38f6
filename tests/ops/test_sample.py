from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from minipaged.ops.base import Bias, Penalties, Sampled, SamplingBatch
from minipaged.ops.cpu.ops import CpuOps
from minipaged.ops.philox import uniforms
from minipaged.ops.reference.ops import ReferenceOps
from minipaged.ops.reference.sampling import adjust_logits, logprobs

Array = NDArray[np.generic]
Logits = NDArray[np.float32]
HostOps = ReferenceOps | CpuOps


@dataclass(frozen=True)
class Settings:
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    sample_index: int = 0
    position: int = 0

    @property
    def uniform(self) -> float:
        key = np.array([self.seed], np.uint64)
        return float(uniforms(key, np.array([self.sample_index], np.uint32), np.array([self.position], np.uint32))[0])


def batch_of(settings: list[Settings], vocab_size: int, *, num_logprobs: int = -1) -> SamplingBatch[Array]:
    def column(values: list[float], dtype: type[np.generic]) -> Array:
        return np.array(values, dtype)

    return SamplingBatch(
        temperature=column([s.temperature for s in settings], np.float32),
        top_k=column([vocab_size if s.top_k is None else s.top_k for s in settings], np.int32),
        top_p=column([s.top_p for s in settings], np.float32),
        min_p=column([s.min_p for s in settings], np.float32),
        seeds=np.array([s.seed for s in settings], np.uint64),
        sample_index=column([s.sample_index for s in settings], np.uint32),
        positions=column([s.position for s in settings], np.uint32),
        num_logprobs=num_logprobs,
        all_greedy=all(s.temperature == 0 for s in settings),
    )


def run(
    host_ops: HostOps, logits: Logits, settings: list[Settings], *, raw: Logits | None = None, num_logprobs: int = -1
) -> Sampled:
    return host_ops.sample(
        logits, logits if raw is None else raw, batch_of(settings, logits.shape[1], num_logprobs=num_logprobs)
    )


def choose(host_ops: HostOps, row: list[float] | Logits, settings: Settings) -> int:
    return int(run(host_ops, np.array([row], np.float32), [settings]).token_ids[0])


# Against a sampler written another way: one row, Python floats, whole lists, products instead of logarithms.


def naive_shares(row: list[float], settings: Settings) -> dict[int, float]:
    """Token id -> probability of those that may be chosen, in id order. Assumes that no threshold is a close call."""
    peak = max(row)
    mass = {token: math.exp((logit - peak) / settings.temperature) for token, logit in enumerate(row)}
    ranking = sorted(mass, key=lambda token: (-row[token], token))
    ranking = ranking[: settings.top_k]
    if settings.top_p < 1:
        target = settings.top_p * math.fsum(mass[token] for token in ranking)
        kept: list[int] = []
        for token in ranking:
            so_far = math.fsum(mass[t] for t in kept)
            assume(abs(so_far - target) > 1e-4)
            if so_far >= target:
                break
            kept.append(token)
        ranking = kept
    for token in ranking:
        assume(settings.min_p in (0, 1) or abs(mass[token] - settings.min_p) > 1e-5)
    ranking = [token for token in ranking if mass[token] >= settings.min_p]
    total = math.fsum(mass[token] for token in ranking)
    return {token: mass[token] / total for token in sorted(ranking)}


logit = st.integers(-40, 40).map(lambda steps: steps / 4)
rows = st.lists(logit, min_size=1, max_size=40)
settings_drawn = st.builds(
    Settings,
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.none() | st.integers(1, 45),
    top_p=st.sampled_from([1e-8, 0.3, 0.61, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.04, 0.3, 1.0]),
    seed=st.integers(0, 2**64 - 1),
    sample_index=st.integers(0, 127),
    position=st.integers(0, 2**31),
)


@given(rows, settings_drawn)
def test_the_choice_is_where_the_cumulative_share_passes_the_uniform_number(
    host_ops: HostOps, row: list[float], settings: Settings
) -> None:
    shares = naive_shares(row, settings)
    token = choose(host_ops, row, settings)
    assert token in shares
    below = math.fsum(share for other, share in shares.items() if other < token)
    assert below - 1e-5 <= settings.uniform <= below + shares[token] + 1e-5


@given(st.data())
def test_a_row_is_the_same_to_the_bit_in_any_batch(host_ops: HostOps, data: st.DataObject) -> None:
    vocab_size = data.draw(st.sampled_from([1, 5, 33, 300, 1031]))
    settings = data.draw(
        st.lists(settings_drawn | settings_drawn.map(lambda s: replace(s, temperature=0.0)), min_size=1, max_size=7)
    )
    generator = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    logits = generator.normal(scale=4, size=(len(settings), vocab_size)).astype(np.float32)
    raw = generator.normal(scale=4, size=logits.shape).astype(np.float32)
    chosen = np.array(data.draw(st.permutations(range(len(settings))))[: data.draw(st.integers(1, len(settings)))])

    whole = run(host_ops, logits, settings, raw=raw, num_logprobs=3)
    part = run(host_ops, logits[chosen], [settings[i] for i in chosen], raw=raw[chosen], num_logprobs=3)
    for name in ("token_ids", "logprobs", "top_ids", "top_logprobs"):
        np.testing.assert_array_equal(getattr(part, name), getattr(whole, name)[chosen])


def test_draws_follow_the_distribution(host_ops: HostOps) -> None:
    num_draws = 40_000
    row = np.array([2.0, -1.0, 0.5, 0.5, -30.0, 1.25], np.float32)
    settings = [Settings(temperature=0.8, seed=7, position=position) for position in range(num_draws)]
    tokens = run(host_ops, np.tile(row, (num_draws, 1)), settings).token_ids
    masses = np.exp(row.astype(np.float64) / 0.8)
    counts = np.bincount(tokens, minlength=len(row))
    assert counts[4] == 0
    likely = [0, 1, 2, 3, 5]
    expected = num_draws * masses[likely] / masses.sum()
    chi_squared = float(((counts[likely] - expected) ** 2 / expected).sum())
    assert chi_squared < 18.5  # 4 degrees of freedom, one in a thousand


def test_a_wide_nucleus_is_found_beyond_the_first_guess(host_ops: HostOps) -> None:
    row = np.zeros(5000, np.float32)
    # Equal tokens: the nucleus of 0.5 is the first half of the ids, and the last draw falls just below the middle.
    tokens = run(host_ops, np.tile(row, (300, 1)), [Settings(top_p=0.5, seed=seed) for seed in range(300)]).token_ids
    assert tokens.max() < 2500
    assert tokens.max() > 2400


def test_min_p_of_one_keeps_the_most_likely(host_ops: HostOps) -> None:
    assert {choose(host_ops, [1.0, 3.0, 2.9, 3.0], Settings(min_p=1.0, seed=seed)) for seed in range(50)} == {1, 3}


# What equals the most likely token


@pytest.mark.parametrize(
    "settings",
    [
        Settings(temperature=0.0),
        Settings(top_k=1),
        Settings(top_p=1e-8),
        Settings(temperature=1e-30),
        Settings(temperature=1e-45),
        Settings(temperature=100.0, top_k=1, top_p=0.5),
    ],
)
@given(rows, st.integers(0, 2**64 - 1))
def test_argmax(host_ops: HostOps, settings: Settings, row: list[float], seed: int) -> None:
    if 0 < settings.temperature < 1e-20:
        assume(row.count(max(row)) == 1)
    assert choose(host_ops, row, replace(settings, seed=seed)) == row.index(max(row))


@given(rows, settings_drawn)
def test_top_k_of_the_vocabulary_is_no_limit(host_ops: HostOps, row: list[float], settings: Settings) -> None:
    unlimited = choose(host_ops, row, replace(settings, top_k=None))
    assert choose(host_ops, row, replace(settings, top_k=len(row))) == unlimited
    assert choose(host_ops, row, replace(settings, top_k=len(row) + 1)) == unlimited


# Extreme logits


@pytest.mark.parametrize("settings", [Settings(temperature=0.0), Settings(), Settings(top_k=2, top_p=0.9, min_p=0.1)])
@pytest.mark.parametrize(
    "bad",
    [
        [math.nan, 1.0, 2.0],
        [0.0, 1.0, math.nan],
        [math.nan] * 3,
        [-math.inf] * 3,
        [math.inf, -math.inf, -math.inf],
        [math.inf, math.nan, 0.0],
    ],
)
def test_a_row_without_a_choice_gives_minus_one_and_harms_no_other(
    host_ops: HostOps, bad: list[float], settings: Settings
) -> None:
    good = [0.5, 3.0, 2.5]
    alone = run(host_ops, np.array([good], np.float32), [settings], num_logprobs=2)
    sampled = run(host_ops, np.array([bad, good, bad], np.float32), [settings] * 3, num_logprobs=2)
    assert sampled.token_ids.tolist() == [-1, alone.token_ids[0], -1]
    assert sampled.logprobs is not None
    assert alone.logprobs is not None
    assert sampled.logprobs[1] == alone.logprobs[0]


@pytest.mark.parametrize("settings", [Settings(temperature=0.0), Settings(seed=4), Settings(seed=9, top_p=0.99)])
@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ([0.0, math.inf, 5.0], 1),
        ([-math.inf, -math.inf, -50.0], 2),
        ([-3e38, 3e38, -3e38], 1),
        ([0.0, 2e4, -1e30], 1),
    ],
)
def test_extreme_logits(host_ops: HostOps, row: list[float], expected: int, settings: Settings) -> None:
    assert choose(host_ops, row, settings) == expected


def test_a_forbidden_token_is_never_drawn(host_ops: HostOps) -> None:
    row = [-math.inf, 0.0, -math.inf, 0.0, -math.inf]
    assert {choose(host_ops, row, Settings(seed=seed)) for seed in range(60)} == {1, 3}


def test_no_rows(host_ops: HostOps) -> None:
    assert run(host_ops, np.empty((0, 5), np.float32), []).token_ids.shape == (0,)


# Log-probabilities


@given(st.lists(rows, min_size=1, max_size=1), st.integers(0, 45))
def test_logprobs_are_the_log_softmax_of_the_raw_logits(raw: list[list[float]], num_top: int) -> None:
    row = raw[0]
    normaliser = math.log(math.fsum(map(math.exp, row)))
    ranking = sorted(range(len(row)), key=lambda token: (-row[token], token))[:num_top]
    chosen, top_ids, top = logprobs(np.array(raw, np.float32), np.array([len(row) - 1], np.int32), num_top)
    assert chosen[0] == pytest.approx(row[-1] - normaliser, abs=1e-5)
    assert top_ids[0].tolist() == ranking
    assert top[0].tolist() == pytest.approx([row[token] - normaliser for token in ranking], abs=1e-5)


def test_logprobs_come_from_raw_logits_and_the_choice_from_the_others(host_ops: HostOps) -> None:
    raw = np.array([[5.0, 0.0, 1.0]], np.float32)
    sampled = run(
        host_ops, np.array([[0.0, 0.0, 9.0]], np.float32), [Settings(temperature=0.0)], raw=raw, num_logprobs=1
    )
    assert sampled.logprobs is not None
    assert sampled.top_ids is not None
    assert sampled.token_ids.tolist() == [2]
    assert sampled.logprobs[0] == pytest.approx(1.0 - math.log(math.exp(5) + 1 + math.e), abs=1e-5)
    assert sampled.top_ids.tolist() == [[0]]


def test_logprobs_of_huge_and_forbidden_logits() -> None:
    own, _, top = logprobs(np.array([[1e30, 1e30, -math.inf]], np.float32), np.array([2], np.int32), 3)
    assert own[0] == -math.inf
    assert top[0].tolist() == pytest.approx([-math.log(2), -math.log(2), -math.inf])


# Penalties and biases


@given(st.data())
def test_adjusted_logits(data: st.DataObject) -> None:
    vocab_size, num_rows = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 5))
    token = st.integers(0, vocab_size - 1)
    logits = [[data.draw(logit) for _ in range(vocab_size)] for _ in range(num_rows)]
    penalised = data.draw(st.lists(st.integers(0, num_rows - 1), unique=True))
    histories = [(data.draw(st.lists(token)), data.draw(st.lists(token))) for _ in penalised]
    factor = st.sampled_from([0.5, 1.0, 2.0])
    strength = st.sampled_from([-1.5, 0.0, 0.25])
    settings = [(data.draw(factor), data.draw(strength), data.draw(strength)) for _ in penalised]
    biases = data.draw(
        st.lists(st.tuples(st.integers(0, num_rows - 1), token, st.sampled_from([-math.inf, -1.0, 2.0])))
    )

    expected = [list(row) for row in logits]
    for row, (prompt, output), (repetition, presence, frequency) in zip(penalised, histories, settings, strict=True):
        for t in {*prompt, *output}:
            expected[row][t] *= 1 / repetition if expected[row][t] > 0 else repetition
        for t in output:
            expected[row][t] -= frequency
        for t in set(output):
            expected[row][t] -= presence
    for row, t, value in biases:
        expected[row][t] += value

    tokens = [data.draw(st.permutations(sorted({*prompt, *output}))) for prompt, output in histories]
    penalties: Penalties[Array] = Penalties(
        rows=np.array(penalised, np.int32),
        starts=np.cumsum([0, *map(len, tokens)], dtype=np.int32),
        token_ids=np.array([t for row in tokens for t in row], np.int32),
        counts=np.array([o.count(t) for row, (_, o) in zip(tokens, histories, strict=True) for t in row], np.int32),
        repetition=np.array([s[0] for s in settings], np.float32),
        presence=np.array([s[1] for s in settings], np.float32),
        frequency=np.array([s[2] for s in settings], np.float32),
    )
    bias: Bias[Array] = Bias(
        rows=np.array([b[0] for b in biases], np.int32),
        token_ids=np.array([b[1] for b in biases], np.int32),
        values=np.array([b[2] for b in biases], np.float32),
    )
    given_logits = np.array(logits, np.float32)
    before = given_logits.copy()
    np.testing.assert_allclose(adjust_logits(given_logits, penalties, bias), expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(given_logits, before)


def test_nothing_to_adjust_is_a_copy() -> None:
    logits = np.ones((2, 3), np.float32)
    adjusted = adjust_logits(logits, None, None)
    adjusted[0] = 5
    assert logits.tolist() == [[1, 1, 1], [1, 1, 1]]


def test_infinities_pass_through_penalties_without_a_warning() -> None:
    penalties: Penalties[Array] = Penalties(
        rows=np.array([0], np.int32),
        starts=np.array([0, 3], np.int32),
        token_ids=np.arange(3, dtype=np.int32),
        counts=np.zeros(3, np.int32),
        repetition=np.array([2.0], np.float32),
        presence=np.array([0.5], np.float32),
        frequency=np.array([0.5], np.float32),
    )
    adjusted = adjust_logits(np.array([[-math.inf, math.inf, math.nan]], np.float32), penalties, None)
    np.testing.assert_array_equal(adjusted, [[-math.inf, math.inf, math.nan]])


@pytest.mark.parametrize("spread", [0.01, 1.0, 4.0])
def test_kernels_choose_as_the_reference_from_a_large_vocabulary(cpu: CpuOps, spread: float) -> None:
    """Sums are rounded differently, so that one choice in a hundred may fall just beside a threshold."""
    generator = np.random.default_rng(0)
    logits = generator.standard_normal((240, 20011), dtype=np.float32) * np.float32(spread)
    logits = np.round(logits, 3)  # with ties
    settings = [
        Settings(
            temperature=(0.7, 1.0)[seed % 2],
            top_k=(None, 40, 1000, 19000)[seed // 2 % 4],
            top_p=(1.0, 0.9, 0.2, 0.999)[seed // 8 % 4],
            min_p=(0.0, 0.05)[seed // 32 % 2],
            seed=seed,
        )
        for seed in range(240)
    ]
    expected = run(ReferenceOps(), logits, settings).token_ids
    assert (run(cpu, logits, settings).token_ids != expected).sum() <= 2
