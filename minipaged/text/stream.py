"""Incremental detokenisation: the text of a completion, token by token."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from minipaged.text.stop import StopMatcher, StopStrings
from minipaged.text.tokenizer import Tokenizer


class TextStream:
    """Turns the token ids of one completion into text that may be shown at once.

    **What the text is.** Every token id stands for bytes (`Tokenizer.token_bytes`), a special token for
    none. Let P be the bytes of the prompt and C those of the completion. The text of the completion is
    the decode of P + C as UTF-8, less the complete characters of P. So a character that the prompt's ids
    leave unfinished belongs to the completion, a leading space after a prompt is kept, and where the
    prompt has no text at all the completion loses the one space that a SentencePiece tokenizer puts
    before every text. Invalid bytes become U+FFFD, one for each maximal invalid part, just as in
    `bytes.decode(errors="replace")`.

    The deltas of `push` and `finish`, joined, equal that text, or, where a stop string occurs in it, the
    text before the first one to be complete (see `StopMatcher`). A character is never split and nothing is
    taken back. Stop strings are looked for in the completion alone, not across its border to the prompt.

    A token costs O(its length); no id sequence raises.

    Args:
        tokenizer: gives the bytes of each id.
        prompt_ids: the ids before the completion; only their last bytes are read.
        stop: stop strings, which are not part of the text.
        min_tokens: the text of this many first tokens is shown without looking for stop strings in it.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int], *, stop: StopStrings | None = None, min_tokens: int = 0
    ) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        prompt_tail = self._last_bytes(prompt_ids)
        self._decode(prompt_tail)
        self._drop_space = tokenizer.adds_space_prefix and not prompt_tail
        self._matcher = StopMatcher(stop) if stop else None
        self._unmatched_tokens = min_tokens

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._matcher.matched if self._matcher else None

    def push(self, token_id: int) -> str:
        """Take the next token; return the text that may be shown now, often all of its own, maybe none."""
        text = self._decode(self._tokenizer.token_bytes(token_id))
        if self._drop_space and text:
            self._drop_space = False
            text = text.removeprefix(" ")
        if self._matcher is None:
            return text
        if self._unmatched_tokens > 0:
            self._unmatched_tokens -= 1
            return text
        return self._matcher.feed(text)

    def finish(self) -> str:
        """The completion ends here: return the text that was held back, an unfinished character as U+FFFD."""
        text = self._decoder.decode(b"", final=True)
        if self._matcher is None:
            return text
        return self._matcher.feed(text) + self._matcher.finish()

    def _decode(self, data: bytes) -> str:
        text = self._decoder.decode(data)
        unfinished, _ = self._decoder.getstate()
        if unfinished[:1] == b"\xed" and unfinished[1:] >= b"\xa0":  # a surrogate, for whose end Python would wait
            text += self._decoder.decode(b"", final=True)
        return text

    def _last_bytes(self, ids: Sequence[int]) -> bytes:
        """At least the last three bytes of `ids`, or all: no unfinished character of UTF-8 is longer.

        Decoding may start in the midst of a character here, but never in the midst of the unfinished one.
        """
        tail = b""
        for token_id in reversed(ids):
            tail = self._tokenizer.token_bytes(token_id) + tail
            if len(tail) >= 3:
                break
        return tail
