"""Generation: one request's way out of the engine, from sampled ids to tokens with text and the completion."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from minipaged.engine.submission import Submission
from minipaged.engine.token_stream import Outbox
from minipaged.errors import MinipagedError, RequestError, RequestFailedError
from minipaged.output import Choice, Completion, Timings, Token, Usage
from minipaged.scheduling.request import Request, Sequence
from minipaged.step import Logprobs
from minipaged.text.stop import StopStrings
from minipaged.text.stream import TextStream
from minipaged.text.tokenizer import Tokenizer


@dataclass(slots=True)
class _Sample:
    """What one of the request's n samples has given besides its token ids."""

    text_stream: TextStream
    texts: list[str] = field(default_factory=list)
    """The text that each token added."""
    logprobs: list[Logprobs] = field(default_factory=list)


class Generation:
    """What the engine keeps of one request, from submit to its end. Used on the event loop's thread.

    It ends exactly once: finished, aborted or failed. Times are seconds on the engine's clock.
    """

    def __init__(self, submission: Submission, outbox: Outbox, on_end: Callable[[Generation], None]) -> None:
        """`on_end` is called when it ends, just before its stream learns of it."""
        self.submission = submission
        self.params = submission.params
        self.outbox = outbox
        self.request: Request | None = None
        """None while the prompt is being encoded."""
        self._on_end: Callable[[Generation], None] | None = on_end
        self._samples: list[_Sample] = []
        self._num_unfinished = submission.params.n
        self._first_token_at: float | None = None

    @property
    def id(self) -> str:
        """The request's id."""
        return self.submission.id

    @property
    def ended(self) -> bool:
        """Whether it has ended. Readable from any thread."""
        return self.outbox.ended

    def begin(self, request: Request, tokenizer: Tokenizer) -> None:
        """The prompt is known, and about to be queued."""
        self.request = request
        request.recipient = self
        params = self.params
        stop = StopStrings(params.stop_strings) if params.stop_strings else None
        self._samples = [
            _Sample(TextStream(tokenizer, request.prompt, stop=stop, min_tokens=params.min_tokens))
            for _ in range(params.n)
        ]

    def add_text(self, index: int, token_id: int) -> str | None:
        """Continue the text of a sample by a token; returns the stop string that ends the sample with it, if one does.

        A token that ends the sequence by its id is a mark, not part of the text, and is not added.
        """
        sample = self._samples[index]
        sample.texts.append(sample.text_stream.push(token_id))
        return sample.text_stream.stopped_by

    def deliver(self, sequence: Sequence, num_tokens: int, logprobs: SequenceOf[Logprobs], now: float) -> None:
        """Put the latest tokens of a sequence into the outbox; after the last sequence's end, the completion too."""
        assert self.request is not None
        sample, token_ids = self._samples[sequence.index], sequence.token_ids
        if self._first_token_at is None:
            self._first_token_at = now
        sample.logprobs += logprobs[:num_tokens]
        if len(sample.texts) < len(token_ids) - len(self.request.prompt):
            sample.texts.append("")  # of the token that ends the sequence
        if sequence.finish_reason is not None and not isinstance(sequence.stop_reason, str):
            sample.texts[-1] += sample.text_stream.finish()
        for place in range(-num_tokens, 0):
            entry = logprobs[num_tokens + place] if logprobs else None
            self.outbox.put(
                Token(
                    text=sample.texts[place],
                    id=token_ids[place],
                    index=sequence.index,
                    logprob=None if entry is None else entry.chosen,
                    top_logprobs=None if entry is None else entry.top,
                    finish_reason=sequence.finish_reason if place == -1 else None,
                )
            )
        if sequence.finish_reason is not None:
            self._num_unfinished -= 1
            if self._num_unfinished == 0:
                self._finish(now)

    def abort(self, now: float) -> None:
        """End it by its caller's wish. Does nothing once it has ended."""
        if not self.ended:
            self._finish(now)  # text still held back stays so: no token is left to bring it

    def fail(self, error: BaseException) -> None:
        """End it with an error, a foreign one as `RequestFailedError`. Does nothing once it has ended."""
        if self.ended:
            return
        if not isinstance(error, MinipagedError):
            failed = RequestFailedError(f"Request {self.id!r} failed: {type(error).__name__}: {error}")
            failed.__cause__ = error
            error = failed
        if isinstance(error, RequestError):
            error.request_id = self.id
        self._end()
        self.outbox.fail(error)

    def _finish(self, now: float) -> None:
        self._end()
        self.outbox.finish(self._completion(now))

    def _end(self) -> None:
        # Whoever keeps the stream of an ended request keeps no engine alive.
        on_end, self._on_end = self._on_end, None
        assert on_end is not None
        on_end(self)

    def _completion(self, now: float) -> Completion:
        request = self.request
        prompt = () if request is None else tuple(request.prompt)
        prompt_logprobs = () if request is None else tuple(request.prompt_logprobs)
        return Completion(
            request_id=self.id,
            choices=tuple(self._choice(index) for index in range(self.params.n)),
            usage=Usage(
                prompt_tokens=len(prompt),
                cached_tokens=0 if request is None else request.cached_tokens,
                completion_tokens=0 if request is None else sum(map(len, map(request.output_of, request.sequences))),
            ),
            timings=self._timings(now),
            prompt_token_ids=prompt,
            prompt_logprobs=None if self.params.prompt_logprobs is None else prompt_logprobs,
        )

    def _choice(self, index: int) -> Choice:
        wanted = self.params.logprobs is not None
        if self.request is None or not self.request.sequences:  # aborted while the prompt was encoded
            nothing = () if wanted else None
            return Choice(index, "", (), "abort", logprobs=nothing, top_logprobs=nothing)
        sample, sequence = self._samples[index], self.request.sequences[index]
        assert sequence.finish_reason is not None
        return Choice(
            index=index,
            text="".join(sample.texts),
            token_ids=tuple(self.request.output_of(sequence)),
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
            logprobs=tuple(entry.chosen for entry in sample.logprobs) if wanted else None,
            top_logprobs=tuple(entry.top for entry in sample.logprobs) if wanted else None,
        )

    def _timings(self, now: float) -> Timings:
        scheduled_at = None if self.request is None else self.request.scheduled_at
        scheduled = now if scheduled_at is None else scheduled_at
        first = now if self._first_token_at is None else self._first_token_at
        return Timings(
            queued=scheduled - self.submission.submitted_at,
            prefill=first - scheduled,
            time_to_first_token=first - self.submission.submitted_at,
            decode=now - first,
        )
