"""The figures of one engine, and the jobs that they come from.

Prompts have 128 tokens and are distinct; every answer has 32 tokens, chosen greedily, its end-of-sequence tokens
ignored; all requests of a batch are submitted at once, and their prompts may all be computed in one step, so that no
request decodes while another is still in prefill. Nothing is taken from a prefix cache, save for the last two.

load_s               from the creation of the process until the first token of a prompt of 8
prefill_tok_s_512    512 / the time from submitting one prompt of 512 tokens until its first token
prefill_tok_s_B      B * 128 / the time from submitting B prompts until each has its first token
decode_tok_s_B       tokens that came after every request had its first, that is 31 B, / the time they took
rss_mb_1             most memory resident, in 10**6 bytes, in a process that did all of the above for B = 1
rss_mb_B             the same in the process of all larger B, up to that B; engine sized for the largest
shared_prefix_cold_s from submitting 32 prompts, which begin with the same 1,000 tokens and go on with 24 of their own,
                     until each has 50 new tokens; the engine's prefix cache is on, and empty
shared_prefix_s      the same for 32 more with those 1,000 tokens

Times are the caller's: when a token reaches the program. Every job is a process of its own, and warms up first.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from benchmarks.peers.engine import Settings
from benchmarks.peers.job import Job, Run, RunResult, do_job
from benchmarks.peers.prompts import Prompts

BATCHES = (4, 8, 16, 32)
"""Besides 1."""
PROMPT, LONG_PROMPT, NEW_TOKENS = 128, 512, 32
PREFIX, SHARED_PROMPT, SHARED_NEW_TOKENS = 1000, 1024, 50
REPEATS = 3
"""Of what is quickly measured: everything with one request."""

Sample = tuple[str, float]
"""A figure's name, and one measurement of it."""


class Measures:
    """Measures one engine after another."""

    def __init__(self, model: Path, prompts: Prompts, threads: int) -> None:
        self._model = model
        self._prompts = prompts
        self._threads = threads
        self.first_tokens: dict[str, list[int]] = {}
        """The first token that each engine chose after each of the prompts of the largest batch."""

    def single(self, engine: str) -> Iterator[Sample]:
        """One request at a time."""
        warm_up = [self._run(1, 8, 1), self._run(1, LONG_PROMPT, 4)]
        long, decode = [self._run(1, LONG_PROMPT, 1)] * REPEATS, [self._run(1, PROMPT, NEW_TOKENS)] * REPEATS
        settings = self._settings(1, LONG_PROMPT + NEW_TOKENS, LONG_PROMPT)
        result = do_job(Job(engine, str(self._model), settings, warm_up + long + decode))
        yield "load_s", result.runs[0].first - result.started
        for run in result.runs[len(warm_up) :][:REPEATS]:
            yield f"prefill_tok_s_{LONG_PROMPT}", _prefill(run, LONG_PROMPT)
        for run in result.runs[-REPEATS:]:
            yield from _throughput(run, 1)
        yield "rss_mb_1", result.runs[-1].peak_bytes / 1e6

    def batches(self, engine: str) -> Iterator[Sample]:
        """Several requests at once."""
        most = max(BATCHES)
        runs = [run for count in BATCHES for run in (self._run(count, 8, 4), self._run(count, PROMPT, NEW_TOKENS))]
        settings = self._settings(most, PROMPT + NEW_TOKENS, most * PROMPT)
        result = do_job(Job(engine, str(self._model), settings, runs))
        for count, run in zip(BATCHES, result.runs[1::2], strict=True):
            yield from _throughput(run, count)
            yield f"rss_mb_{count}", run.peak_bytes / 1e6
        self.first_tokens[engine] = [tokens[0] for tokens in result.runs[-1].token_ids]

    def shared_prefix(self, engine: str) -> Iterator[Sample]:
        """A chat service's load: one system prompt, many users."""
        count = max(BATCHES)
        settings = self._settings(count, SHARED_PROMPT + SHARED_NEW_TOKENS, None, prefix_caching=True)
        prompts = self._prompts.with_shared_prefix(2 * count, PREFIX, SHARED_PROMPT)
        runs = [Run(prompts[:count], SHARED_NEW_TOKENS), Run(prompts[count:], SHARED_NEW_TOKENS)]
        result = do_job(Job(engine, str(self._model), settings, [self._run(count, 8, 4), *runs]))
        for name, run in zip(("shared_prefix_cold_s", "shared_prefix_s"), result.runs[1:], strict=True):
            yield name, run.finished - run.started

    def _run(self, count: int, length: int, new_tokens: int) -> Run:
        return Run(self._prompts.batch(count, length), new_tokens)

    def _settings(
        self, max_requests: int, max_length: int, prompt_tokens_per_step: int | None, *, prefix_caching: bool = False
    ) -> Settings:
        return Settings(
            threads=self._threads,
            max_requests=max_requests,
            max_length=max_length,
            prompt_tokens_per_step=prompt_tokens_per_step,
            prefix_caching=prefix_caching,
        )


def _prefill(run: RunResult, tokens: int) -> float:
    return tokens / (run.first - run.started)


def _throughput(run: RunResult, count: int) -> Iterator[Sample]:
    yield f"prefill_tok_s_{count}", _prefill(run, count * PROMPT)
    yield f"decode_tok_s_{count}", run.decoded_tokens / (run.finished - run.first)
