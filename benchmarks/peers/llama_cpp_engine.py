"""llama.cpp, through llama-cpp-python's low-level interface: its `Llama` class runs one request at a time.

All sequences share each call of llama_decode, as in llama.cpp's own batched benchmark. Everything else is left as
llama.cpp sets it by default.
"""

from __future__ import annotations

import ctypes
import itertools
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from benchmarks.peers.engine import Answer, Settings

Entry = tuple[int, int, int, bool]
"""Token id, position, sequence, and whether its logits are wanted."""

IGNORE_LOG = llama_cpp.llama_log_callback(lambda level, text, user_data: None)
"""llama.cpp would write a page about the model. It keeps no reference to the callback."""


class LlamaCppEngine:
    """See `PeerEngine`."""

    def __init__(self, model: Path, settings: Settings) -> None:
        llama_cpp.llama_log_set(IGNORE_LOG, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self._settings = settings
        self._model = llama_cpp.llama_model_load_from_file(str(model).encode(), llama_cpp.llama_model_default_params())
        vocab = llama_cpp.llama_model_get_vocab(self._model)
        self._vocab_size: int = llama_cpp.llama_vocab_n_tokens(vocab)
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx = settings.max_requests * settings.max_length
        parameters.n_seq_max = settings.max_requests
        parameters.n_threads = parameters.n_threads_batch = settings.threads
        # One cache for all sequences lets them share cells; one for each is faster where they share nothing.
        parameters.kv_unified = settings.prefix_caching
        self._context = llama_cpp.llama_init_from_model(self._model, parameters)
        self._batch_size: int = parameters.n_batch
        self._batch = llama_cpp.llama_batch_init(self._batch_size, 0, 1)
        self._prefix: list[int] = []
        """Tokens whose KV is in sequence 0."""

    def answer(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[Answer]:
        answers = [Answer([], []) for _ in prompts]
        length = len(prompts[0])
        start = self._share_prefix(prompts)
        entries = [
            (prompt[position], position, sequence, position == length - 1)
            for sequence, prompt in enumerate(prompts)
            for position in range(start, length)
        ]
        for position in range(length, length + new_tokens):
            chosen = self._decode(entries)
            now = time.monotonic()
            for answer, token_id in zip(answers, chosen, strict=True):
                answer.token_ids.append(token_id)
                answer.arrivals.append(now)
            entries = [(token_id, position, sequence, True) for sequence, token_id in enumerate(chosen)]
        return answers

    def logits(self, prompt: Sequence[int]) -> NDArray[np.float32]:
        """Logits of every position of one prompt, float32 [len(prompt), vocab_size]."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), False)
        entries = [(token_id, position, 0, True) for position, token_id in enumerate(prompt)]
        return np.concatenate([logits.copy() for logits in self._forward(entries)])

    def _share_prefix(self, prompts: Sequence[Sequence[int]]) -> int:
        """Empty the cache, but for the tokens in which all prompts agree, computed if need be; returns how many."""
        memory = llama_cpp.llama_get_memory(self._context)
        prefix = _common_prefix(prompts) if self._settings.prefix_caching else []
        if prefix and prefix == self._prefix:
            llama_cpp.llama_memory_seq_keep(memory, 0)
            llama_cpp.llama_memory_seq_rm(memory, 0, len(prefix), -1)
        else:
            llama_cpp.llama_memory_clear(memory, False)
            self._decode([(token_id, position, 0, False) for position, token_id in enumerate(prefix)])
        for sequence in range(1, len(prompts)):
            llama_cpp.llama_memory_seq_cp(memory, 0, sequence, 0, len(prefix))
        self._prefix = prefix
        return len(prefix)

    def _decode(self, entries: Sequence[Entry]) -> list[int]:
        """The most likely next token of every entry that wants logits."""
        return [token_id for logits in self._forward(entries) for token_id in logits.argmax(axis=1).tolist()]

    def _forward(self, entries: Sequence[Entry]) -> Iterator[NDArray[np.float32]]:
        """Compute the entries, a batch at a time; yields each batch's wanted logits, valid until the next one."""
        batch = self._batch
        for start in range(0, len(entries), self._batch_size):
            part = entries[start : start + self._batch_size]
            batch.n_tokens = len(part)
            for index, (token_id, position, sequence, wanted) in enumerate(part):
                batch.token[index] = token_id
                batch.pos[index] = position
                batch.n_seq_id[index] = 1
                batch.seq_id[index][0] = sequence
                batch.logits[index] = wanted
            status = llama_cpp.llama_decode(self._context, batch)
            if status != 0:
                raise RuntimeError(f"llama_decode returned {status}")
            if num_wanted := sum(wanted for *_, wanted in part):
                pointer = llama_cpp.llama_get_logits(self._context)
                yield np.ctypeslib.as_array(pointer, (num_wanted, self._vocab_size))


def _common_prefix(prompts: Sequence[Sequence[int]]) -> list[int]:
    """The tokens at which all prompts agree, less than a whole prompt."""
    agreed = itertools.takewhile(lambda column: len(set(column)) == 1, zip(*prompts, strict=True))
    return [column[0] for column in agreed][: len(prompts[0]) - 1]
