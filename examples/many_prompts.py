"""Many requests at once on one engine, each handled as soon as it is done: python examples/many_prompts.py [model]."""

import asyncio
import sys

from minipaged import Engine, SamplingParams

SYSTEM = "You are a geography teacher. Answer with the name of the city only."
COUNTRIES = ["France", "Italy", "Japan", "Egypt", "Peru", "Canada"]


async def ask(engine: Engine, country: str) -> None:
    """One request. They all begin with the same system prompt, whose KV blocks they share."""
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": f"What is the capital of {country}?"},
    ]
    completion = await engine.chat(messages, SamplingParams(temperature=0, max_tokens=30)).completion()
    print(f"{country}: {completion.text.strip()}  ({completion.usage.cached_tokens} prompt tokens from the cache)")


async def main(model: str | None) -> None:
    """Ask for all of them."""
    async with Engine.load(model) as engine, asyncio.TaskGroup() as tasks:
        for country in COUNTRIES:
            tasks.create_task(ask(engine, country))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else None))
