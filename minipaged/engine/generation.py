"""Generation: one request's way out of the engine, from sampled ids to tokens with text and the completion."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from minipaged.engine.submission import Submission
from minipaged.engine.token_stream import Outbox
from minipaged.output import Choice, Completion, FinishReason, Timings, Token, TokenLogprob, Usage
from minipaged.scheduling.request import Request
from minipaged.step import Logprobs
from minipaged.text.stop import StopStrings
from minipaged.text.stream import TextStream
from minipaged.text.tokenizer import Tokenizer


@dataclass(slots=True)
class _Sample:
    """What one of the request's n samples has given so far."""

    text_stream: TextStream | None = None
    """Set when the prompt is known."""
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


class Generation:
    """What the engine keeps of one request, from submit to its end. Used on the event loop's thread.

    Times are seconds on the engine's clock.
    """

    def __init__(self, submission: Submission, outbox: Outbox) -> None:
        self.submission = submission
        self.params = submission.params
        self.outbox = outbox
        self.request: Request | None = None
        """None while the prompt is being encoded."""
        self._samples = [_Sample() for _ in range(self.params.n)]
        self._prompt_logprobs: list[tuple[TokenLogprob, ...]] = []
        self._first_token_at: float | None = None

    @property
    def id(self) -> str:
        """The request's id."""
        return self.submission.id

    def begin(self, request: Request, tokenizer: Tokenizer) -> None:
        """The prompt is known, and queued."""
        self.request = request
        stop = StopStrings(self.params.stop_strings) if self.params.stop_strings else None
        for sample in self._samples:
            sample.text_stream = TextStream(tokenizer, request.prompt, stop=stop, min_tokens=self.params.min_tokens)

    def add_prompt_logprobs(self, entries: SequenceOf[tuple[TokenLogprob, ...]]) -> None:
        """Those of the next prompt tokens."""
        self._prompt_logprobs.extend(entries)

    def add_token(
        self, index: int, token_id: int, logprobs: Logprobs | None, finish_reason: FinishReason | None, now: float
    ) -> bool:
        """A sample's next token, and why the scheduler ended it there if it did. Returns whether the sample has ended.

        A stop string ends it too, also where the scheduler saw the token limit. After the last sample's end the
        completion is in the outbox.
        """
        sample = self._samples[index]
        assert sample.text_stream is not None
        assert sample.finish_reason is None
        if self._first_token_at is None:
            self._first_token_at = now
        sample.token_ids.append(token_id)
        if logprobs is not None:
            sample.logprobs.append(logprobs)
        text = self._decode(sample.text_stream, token_id, finish_reason)
        if sample.text_stream.stopped_by is not None:
            finish_reason, sample.stop_reason = "stop", sample.text_stream.stopped_by
        elif finish_reason == "stop":
            sample.stop_reason = token_id
        sample.texts.append(text)
        sample.finish_reason = finish_reason
        self.outbox.put(
            Token(
                text=text,
                id=token_id,
                index=index,
                logprob=None if logprobs is None else logprobs.chosen,
                top_logprobs=None if logprobs is None else logprobs.top,
                finish_reason=finish_reason,
            )
        )
        if finish_reason is not None and all(sample.finish_reason is not None for sample in self._samples):
            self.outbox.finish(self._completion(now))
        return finish_reason is not None

    def abort(self, now: float) -> None:
        """End all samples that have not ended, by the caller's wish."""
        for sample in self._samples:
            if sample.finish_reason is None:
                sample.finish_reason = "abort"  # text still held back stays so: no token is left to bring it
        self.outbox.finish(self._completion(now))

    def _decode(self, text_stream: TextStream, token_id: int, finish_reason: FinishReason | None) -> str:
        # A token that ends the sequence is a mark, not part of the text.
        text = "" if finish_reason == "stop" else text_stream.push(token_id)
        return text if finish_reason is None or text_stream.stopped_by else text + text_stream.finish()

    def _completion(self, now: float) -> Completion:
        request = self.request
        prompt = () if request is None else tuple(request.prompt)
        return Completion(
            request_id=self.id,
            choices=tuple(self._choice(index) for index in range(self.params.n)),
            usage=Usage(
                prompt_tokens=len(prompt),
                cached_tokens=0 if request is None else request.cached_tokens,
                completion_tokens=sum(len(sample.token_ids) for sample in self._samples),
            ),
            timings=self._timings(now),
            prompt_token_ids=prompt,
            prompt_logprobs=None if self.params.prompt_logprobs is None else tuple(self._prompt_logprobs),
        )

    def _choice(self, index: int) -> Choice:
        sample = self._samples[index]
        assert sample.finish_reason is not None
        wanted = self.params.logprobs is not None
        return Choice(
            index=index,
            text="".join(sample.texts),
            token_ids=tuple(sample.token_ids),
            finish_reason=sample.finish_reason,
            stop_reason=sample.stop_reason,
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
