"""Stream one answer: python examples/stream_answer.py [model]."""

import asyncio
import sys

from minipaged import Engine, SamplingParams


async def main(model: str | None) -> None:
    """Print the tokens as they come, then what they took."""
    async with Engine.load(model) as engine:
        stream = engine.chat(
            [{"role": "user", "content": "Why is the sky blue?"}], SamplingParams(temperature=0, max_tokens=200)
        )
        async for token in stream:
            print(token.text, end="", flush=True)
        completion = await stream.completion()
        usage, timings = completion.usage, completion.timings
        print(
            f"\n\n{usage.prompt_tokens} tokens in, {usage.completion_tokens} out, ended by {completion.finish_reason};"
        )
        print(f"first token after {timings.time_to_first_token:.2f} s, the others in {timings.decode:.2f} s.")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else None))
