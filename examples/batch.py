"""A list of prompts, without async: python examples/batch.py [model]."""

import sys

from minipaged import LLM, SamplingParams

PROMPTS = ["The capital of France is", "Water boils at", "The opposite of hot is", "Two plus two is"]


def main(model: str | None) -> None:
    """Complete all prompts in one batch, then print them in their order."""
    with LLM(model) as llm:
        completions = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=12))
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        print(f"{prompt!r} -> {completion.text!r}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
