"""The default model, from text to text, against what Hugging Face transformers made of the same file (tests/golden)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NotRequired, TypedDict

import anyio

from minipaged import Completion, Engine, SamplingParams
from minipaged.config import DeviceName
from minipaged.text.chat import Message

MARGIN = 1.0
"""Where the best logit leads by as much, the CPU kernels' 8-bit activations must not change the choice."""


class GoldenPrompt(TypedDict):
    """An entry of smollm2.json: a text, or the messages of a chat, and greedy output with its margins."""

    text: str
    messages: NotRequired[list[Message]]
    prompt_ids: list[int]
    output_ids: list[int]
    margins: list[float]
    output_text: str


def golden_prompts() -> list[GoldenPrompt]:
    prompts: list[GoldenPrompt] = json.loads((Path(__file__).parent / "golden" / "smollm2.json").read_text())["prompts"]
    assert len(prompts) >= 8
    return prompts


def test_greedy_answers_equal_transformers() -> None:
    """Raw and chat, several scripts, all at once; the float32 operations and the project's own tokenizer."""
    golden = golden_prompts()
    completions: list[Completion | None] = [None] * len(golden)

    async def main() -> None:
        async with Engine.load(device="reference") as engine:

            async def ask(index: int, entry: GoldenPrompt) -> None:
                params = SamplingParams(temperature=0, max_tokens=len(entry["output_ids"]), ignore_eos=True)
                if "messages" in entry:
                    stream = engine.chat(entry["messages"], params)
                else:
                    stream = engine.generate(entry["text"], params)
                completions[index] = await stream.completion()

            async with anyio.create_task_group() as group:
                for index, entry in enumerate(golden):
                    group.start_soon(ask, index, entry)

    anyio.run(main)
    for entry, completion in zip(golden, completions, strict=True):
        assert completion is not None
        assert list(completion.prompt_token_ids) == entry["prompt_ids"]
        assert list(completion.token_ids) == entry["output_ids"], entry["text"]


def test_cpu_kernels_choose_the_same_wherever_the_choice_is_clear() -> None:
    anyio.run(assert_clear_choices, "cpu", MARGIN)


async def assert_clear_choices(device: DeviceName, margin_that_is_clear: float) -> None:
    """Every golden answer is fed in as a prompt, and its tokens must be the most likely ones given those before."""
    clear = 0
    async with Engine.load(device=device) as engine:
        for entry in golden_prompts():
            prompt_ids, output_ids = entry["prompt_ids"], entry["output_ids"]
            params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
            completion = await engine.generate([*prompt_ids, *output_ids], params).completion()
            assert completion.prompt_logprobs is not None
            positions = completion.prompt_logprobs[len(prompt_ids) - 1 :]
            for expected, margin, (own, best) in zip(output_ids, entry["margins"], positions, strict=True):
                assert own.id == expected
                if margin >= margin_that_is_clear:
                    clear += 1
                    assert best.id == expected, entry["text"]
    assert clear > 100
