"""SamplingParams refuses everything that it could only misunderstand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from minipaged import InvalidRequestError, SamplingParams

WRONG: dict[str, list[object]] = {
    "temperature": [-0.1, 1e39, 10**400, math.inf, math.nan, "1", None, True],
    "top_k": [-2, 2.5, "1", None, True],
    "top_p": [0, -1, 1.1, math.nan, "1", None],
    "min_p": [-0.1, 1.1, math.nan, None],
    "seed": [-1, 2**64, 1.0, "1", True],
    "max_tokens": [0, -1, 1.5, True, "3"],
    "min_tokens": [-1, 1.5, None, True],
    "stop": ["", "x" * 4097, ["xy"] * 2049, ["a", ""], [1], 5, b"x", {"a": 1}],
    "stop_token_ids": ["12", 5, {1: 2}],
    "ignore_eos": [1, "yes", None],
    "repetition_penalty": [0, -1, 1e-50, 1e39, math.inf, math.nan, "1"],
    "presence_penalty": [-2.1, 2.1, math.nan],
    "frequency_penalty": [-2.1, 2.1, math.nan],
    "logit_bias": [{1: math.inf}, {1: 1e39}, {1: -1e39}, {1: 10**400}, {1: math.nan}, {1: "x"}, [1, 2]],
    "logprobs": [-1, 65, 1.5, True],
    "prompt_logprobs": [-1, 65, 1.5, True],
    "n": [0, 129, 1.5, True, None],
    "logits_callback": [5, "x"],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_wrong_values_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(InvalidRequestError, match=rf"SamplingParams\.{name}"):
        SamplingParams(**{name: value})  # type: ignore[arg-type]


def test_min_tokens_must_not_exceed_max_tokens() -> None:
    with pytest.raises(InvalidRequestError, match="min_tokens is 5"):
        SamplingParams(max_tokens=4, min_tokens=5)


def test_numbers_of_numpy_are_numbers() -> None:
    params = SamplingParams(temperature=float(np.float32(0.5)), top_k=int(np.int64(3)), seed=2**64 - 1)
    assert SamplingParams(temperature=np.float32(0.5), top_k=np.int64(3), seed=2**64 - 1) == params  # type: ignore[arg-type]


def test_collections_are_copied() -> None:
    stop, ids, bias = ["a"], [1], {2: -math.inf}
    params = SamplingParams(stop=stop, stop_token_ids=ids, logit_bias=bias)
    stop.append("b")
    ids.append(2)
    bias[3] = 1.0
    assert (params.stop_strings, params.stop_token_ids, params.logit_bias) == (("a",), (1,), {2: -math.inf})
    assert SamplingParams(stop="end").stop_strings == ("end",)
