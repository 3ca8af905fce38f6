"""cuda/attention.cu against dense softmax in float64."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minipaged.ops.cuda.ops import HEAD_DIMS
from tests.ops.cuda.attention_model import ELEMENTS, NUM_LAYERS, SPLIT, TOLERANCES, Array, LowScores, Model, Span
from tests.ops.cuda.emulated import Order


@st.composite
def models(draw: st.DrawFn, head_dim: int, element: str) -> Model:
    """Lengths around multiples of blocks, tiles and splits."""
    near = st.builds(
        lambda size, over: max(1, size + over), st.sampled_from([16, 32, 64, 128, 192]), st.integers(-2, 2)
    )
    return Model(
        element=element,
        num_kv_heads=draw(st.integers(1, 2)),
        group=draw(st.sampled_from([1, 2, 3, 4, 7, 8, 20, 71])),
        head_dim=head_dim,
        block_size=draw(st.sampled_from([1, 7, 16, 16, 32])),
        lengths=tuple(draw(st.lists(near | st.integers(1, 70), min_size=1, max_size=3))),
        window=draw(st.none() | st.integers(1, 100)),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


def drawn_spans(data: st.DataObject, model: Model, *, longest: int) -> list[Span]:
    """A step: of each sequence its last token, or a chunk that ends with it."""
    spans = []
    for row, length in enumerate(model.lengths):
        size = data.draw(st.just(1) | st.integers(1, min(length, longest)))
        spans.append(Span(row, length - size, length))
    return data.draw(st.permutations(spans))


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@settings(max_examples=6)
@given(data=st.data())
def test_decode_and_prefill_in_one_launch_in_two_orders_of_threads(
    head_dim: int, element: str, data: st.DataObject
) -> None:
    model = data.draw(models(head_dim, element))
    spans = drawn_spans(data, model, longest=40)
    attended = model.attend(spans)
    model.assert_close(spans, attended)
    for one, other in zip(attended, model.attend(spans, order=Order.SHUFFLED), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@settings(max_examples=4)
@given(data=st.data())
def test_a_token_has_the_same_bits_in_prefill_and_decode_and_any_company(head_dim: int, data: st.DataObject) -> None:
    model = data.draw(models(head_dim, data.draw(st.sampled_from(list(ELEMENTS)))))
    length = model.lengths[0]
    whole = model.attend([Span(0, 0, length)])[0]
    # In chunks, each in the company of other sequences.
    cuts = sorted(data.draw(st.sets(st.integers(1, length - 1), max_size=2))) if length > 1 else []
    for start, end in zip([0, *cuts], [*cuts, length], strict=True):
        others = [Span(row, max(0, other - 3), other) for row, other in enumerate(model.lengths) if row]
        spans = data.draw(st.permutations([Span(0, start, end), *others]))
        chunk = model.attend(spans)[[span.row for span in spans].index(0)]
        assert chunk.tobytes() == whole[start:end].tobytes()
    # By themselves, as decoding does; many at once, for a difference in float32 seldom survives the rounding.
    decoded = [Span(0, position, position + 1) for position in data.draw(st.permutations(range(length)))[:50]]
    for kernel in ("attention_decode", "attention"):
        for span, alone in zip(decoded, model.attend(decoded, kernel), strict=True):
            assert alone.tobytes() == whole[span.start : span.end].tobytes()


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_no_fault_in_check_mode(head_dim: int, element: str) -> None:
    model = Model(element, 2, 3, head_dim, 16, (SPLIT + 17, 2 * SPLIT, 5), window=SPLIT + 20, seed=1)
    mixed = [Span(1, 2 * SPLIT - 1, 2 * SPLIT), Span(0, SPLIT - 10, SPLIT + 17), Span(2, 0, 5)]
    model.assert_close(mixed, model.attend(mixed, order=Order.SHUFFLED, checked=True))
    decoded = [Span(row, length - 1, length) for row, length in enumerate(model.lengths)]
    model.assert_close(decoded, model.attend(decoded, "attention_decode", Order.SHUFFLED, checked=True))


@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("element", ELEMENTS)
def test_scores_far_below_zero_have_the_weights_of_their_differences(element: str, head_dim: int) -> None:
    """No exponential of such a score is above 0 in float32: a maximum that began at 0 would leave a total of 0."""
    model = LowScores(element, 2, 3, head_dim, 16, (SPLIT + 17, 2 * SPLIT, 5), window=None, seed=5)
    chunks = [Span(0, SPLIT - 10, SPLIT + 17), Span(1, 2 * SPLIT - 1, 2 * SPLIT), Span(2, 0, 5)]
    model.assert_close(chunks, model.attend(chunks))
    decoded = [Span(row, length - 1, length) for row, length in enumerate(model.lengths)]
    model.assert_close(decoded, model.attend(decoded, "attention_decode"))


def test_nan_that_is_seen_comes_out_in_its_own_rows_alone() -> None:
    class Poisoned(Model):
        def vectors(self, row: int) -> tuple[Array, Array, Array]:
            query, key, value = super().vectors(row)
            if row == 1:
                key[40] = np.nan
            return query, key, value

    model = Poisoned("__half", 2, 3, 64, 16, (90, 70), window=None, seed=3)
    healthy, poisoned = model.attend([Span(0, 80, 90), Span(1, 35, 70)])
    np.testing.assert_allclose(healthy, model.expected(Span(0, 80, 90)), rtol=0, atol=TOLERANCES["__half"])
    assert np.isfinite(poisoned[:5]).all()
    assert np.isnan(poisoned[5:]).all()


def test_offsets_into_a_large_cache_do_not_overflow() -> None:
    model = Model("__half", 2, 2, 64, 16, (70, 40, 90), window=None, seed=4)
    elements_per_block = NUM_LAYERS * 2 * model.num_kv_heads * model.block_size * model.head_dim
    spans = [Span(0, 60, 70), Span(1, 39, 40), Span(2, 89, 90)]
    model.assert_close(spans, model.attend(spans, spare_blocks=2**32 // elements_per_block))
