"""How long the event loop is held up: a 5 ms heartbeat while a long text is encoded and while forwards run.

The gap of a beat is the time since the one before, less 5 ms.

Run: python -m benchmarks.heartbeat [MODEL]. The last line is one JSON object: the largest gap in milliseconds for each
phase, `idle` being the machine's own.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

import anyio

from minipaged import Engine, PromptTooLongError, SamplingParams

PERIOD = 0.005
ENCODED_TOKENS = 20_000
SENTENCE = "The quick brown fox, numbered 1234567, jumps over the lazy dog while rain falls in the garden. "


async def largest_gap(work: Callable[[], Awaitable[object]]) -> float:
    """The largest gap of a heartbeat beside `work`, in milliseconds."""
    largest = 0.0

    async def beat() -> None:
        nonlocal largest
        last = time.perf_counter()
        while True:
            await anyio.sleep(PERIOD)
            now = time.perf_counter()
            largest = max(largest, now - last - PERIOD)
            last = now

    async with anyio.create_task_group() as group:
        group.start_soon(beat)
        await work()
        group.cancel_scope.cancel()
    return round(largest * 1000, 2)


async def main(model: str | None) -> None:
    async with Engine.load(model) as engine:
        text = SENTENCE
        while len(engine.tokenizer.encode(text)) < ENCODED_TOKENS:
            text += text
        one_token = SamplingParams(temperature=0, max_tokens=1)

        async def encode() -> None:
            """The prompt is far too long for the model, so that nothing but the encoding happens."""
            for index in range(5):
                with suppress(PromptTooLongError):
                    await engine.generate(f"{index} {text}", one_token).completion()

        async def prefill() -> None:
            ids = engine.tokenizer.encode(text)[: engine.capacity.max_model_len // 2]
            await engine.generate(ids[:1024], one_token).completion()

        async def decode() -> None:
            params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
            streams = [engine.generate([500 + index] * 8, params) for index in range(32)]
            for stream in streams:
                await stream.completion()

        phases: dict[str, Callable[[], Awaitable[object]]] = {
            "idle": lambda: anyio.sleep(1),
            "encode": encode,
            "prefill": prefill,
            "decode": decode,
        }
        gaps = {name: await largest_gap(phase) for name, phase in phases.items()}
    print(json.dumps({f"{name}_gap_ms": gap for name, gap in gaps.items()}))


if __name__ == "__main__":
    anyio.run(main, sys.argv[1] if len(sys.argv) > 1 else None)
