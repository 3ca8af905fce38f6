from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from numpy.typing import NDArray

from minipaged import (
    LLM,
    EngineConfig,
    EngineDeadError,
    InvalidRequestError,
    MinipagedError,
    ModelLoadError,
    SamplingParams,
)
from minipaged.engine.submission import Prompt
from tests.engine.engines import SMALL, minipaged_threads

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture
def llm(tiny_model: Path) -> Iterator[LLM]:
    """Afterwards, every block must have been given back."""
    with LLM(tiny_model, config=EngineConfig(**SMALL), max_waiting=4) as llm:
        yield llm
        while llm.stats().running:
            time.sleep(0.001)
        stats = llm.stats()
        assert (stats.waiting, stats.blocks.in_use) == (0, 0)


def test_more_prompts_than_may_wait(llm: LLM) -> None:
    prompts = [[5, 6, 10 + index] for index in range(50)]
    completions = llm.generate(prompts, GREEDY, progress=False)
    assert [list(completion.prompt_token_ids) for completion in completions] == prompts
    alone = llm.generate([prompts[7]], GREEDY)
    assert alone[0].token_ids == completions[7].token_ids
    with ThreadPoolExecutor(len(prompts)) as threads:
        answers = list(threads.map(lambda prompt: [token.id for token in llm.stream(prompt, GREEDY)], prompts))
    assert answers == [list(completion.token_ids) for completion in completions]


def test_one_prompt_or_several(llm: LLM) -> None:
    for prompts, count in (("text", 1), ([5, 6], 1), (["text"], 1), ([[5, 6], "text"], 2)):
        assert len(llm.generate(cast(Sequence[Prompt], prompts), GREEDY)) == count
    assert llm.generate([]) == []
    assert llm.tokenizer.vocab_size == llm.model_config.vocab_size


def test_params_for_each_prompt(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=count, ignore_eos=True) for count in (1, 5, 3)]
    completions = llm.generate([[5], [5], [5]], params)
    assert [len(completion.token_ids) for completion in completions] == [1, 5, 3]
    with pytest.raises(InvalidRequestError, match="3 SamplingParams for 2 prompts"):
        llm.generate([[5], [5]], params)


def test_chat(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "Why is the sea salty?"}]
    single, double = llm.chat(conversation, GREEDY), llm.chat([conversation, conversation], GREEDY)
    assert [completion.text for completion in double] == [single[0].text] * 2


def test_stream(llm: LLM) -> None:
    expected = llm.generate([5, 6, 7], GREEDY)[0]
    assert [token.id for token in llm.stream([5, 6, 7], GREEDY)] == list(expected.token_ids)
    for _ in llm.stream([5, 6, 7], SamplingParams(max_tokens=400)):
        break


def test_bad_prompt_aborts_the_others(llm: LLM) -> None:
    long = SamplingParams(max_tokens=400, ignore_eos=True)
    with pytest.raises(InvalidRequestError, match="surrogate"):
        llm.generate(cast(list[Prompt], [[5], [6], "\ud800", [7]]), long)
    with pytest.raises(InvalidRequestError, match="of the prompt is 9999"):
        llm.generate([[5], [6], [9999], [7]], long)


def test_threads_share_the_batch(llm: LLM) -> None:
    prompts = [[[5, 6, 10 + thread, 10 + index] for index in range(10)] for thread in range(4)]
    expected = [[completion.token_ids for completion in llm.generate(each, GREEDY)] for each in prompts]
    found: dict[int, list[tuple[int, ...]]] = {}

    def work(thread: int) -> None:
        found[thread] = [completion.token_ids for completion in llm.generate(prompts[thread], GREEDY)]

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[index] for index in range(4)] == expected


def interrupt_main_thread() -> None:
    """As Ctrl-C does."""
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, signal.SIGINT)


def test_interrupt_aborts_what_is_running(llm: LLM) -> None:
    steps: list[int] = []
    handled = threading.Event()

    def interrupt(token_ids: Sequence[int], logits: NDArray[np.float32]) -> NDArray[np.float32]:
        steps.append(len(token_ids))
        if len(steps) == 20:
            interrupt_main_thread()
            assert handled.wait(30)
        return logits

    with pytest.raises(KeyboardInterrupt):
        llm.generate([[5], [6]], SamplingParams(max_tokens=500, ignore_eos=True, logits_callback=interrupt))
    handled.set()
    while llm.stats().running:
        time.sleep(0.001)
    assert len(steps) < 30


def test_interrupted_loading(tiny_model: Path) -> None:
    reports: list[int] = []

    def progress(what: str, done: int, total: int) -> None:
        reports.append(done)
        if len(reports) == 1:
            interrupt_main_thread()
        time.sleep(0.01)

    with pytest.raises(KeyboardInterrupt):
        LLM(tiny_model, progress=progress)
    assert minipaged_threads() == []


def test_progress_bar_on_a_terminal_only(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = [[5], [6], [7]]
    llm.generate(prompts, GREEDY)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then takes anything for a terminal
    llm.generate(prompts, GREEDY, progress=False)
    assert capsys.readouterr() == ("", "")
    llm.generate(prompts, GREEDY)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "3/3" in captured.err


def test_closed(tiny_model: Path) -> None:
    llm = LLM(tiny_model, config=EngineConfig(**SMALL))
    llm.close()
    llm.close()
    with pytest.raises(EngineDeadError):
        llm.generate([5])
    with pytest.raises(EngineDeadError):
        next(llm.stream([5]))


def test_close_while_another_thread_waits(tiny_model: Path) -> None:
    llm = LLM(tiny_model, config=EngineConfig(**SMALL))
    started = threading.Event()
    errors: list[MinipagedError] = []

    def notice(token_ids: Sequence[int], logits: NDArray[np.float32]) -> NDArray[np.float32]:
        started.set()
        return logits

    def work() -> None:
        try:
            llm.generate([[5], [6]] * 100, SamplingParams(max_tokens=500, ignore_eos=True, logits_callback=notice))
        except MinipagedError as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    assert started.wait(30)
    llm.close()
    thread.join()
    assert len(errors) == 1


def test_load_error(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError):
        LLM(tmp_path)
    assert minipaged_threads() == []


def collect_garbage() -> None:
    gc.collect()


class Holder:
    """Part of a reference cycle, as objects in the frames of a traceback are: only garbage collection finds it."""

    def __init__(self, *held: object) -> None:
        self.held = held
        self.itself = self


@pytest.fixture(params=["main", "minipaged-llm", "minipaged-steps", "minipaged-text"])
def collect(request: pytest.FixtureRequest) -> Iterator[Callable[[LLM], Callable[[], None]]]:
    """Given an LLM, a function that collects garbage on one of the threads, which alone does so until the test ends."""

    def prepare(llm: LLM) -> Callable[[], None]:
        threads = llm._engine._threads
        assert threads is not None
        workers = {"minipaged-steps": threads.step_worker, "minipaged-text": threads.text_worker}
        if request.param == "main":
            return collect_garbage
        if request.param == "minipaged-llm":
            return partial(llm._thread.post, collect_garbage)
        return partial(workers[request.param].submit, gc.collect, lambda _: None, lambda _: None)

    gc.disable()
    yield prepare
    gc.enable()


def test_lost(tiny_model: Path, collect: Callable[[LLM], Callable[[], None]]) -> None:
    llm = LLM(tiny_model, config=EngineConfig(**SMALL))
    engine, collect_there = weakref.ref(llm._engine), collect(llm)
    held = Holder(llm)
    del llm, held
    assert engine() is not None
    collect_there()
    while minipaged_threads() or engine() is not None:
        time.sleep(0.001)


def test_lost_stream(llm: LLM, collect: Callable[[LLM], Callable[[], None]]) -> None:
    collect_there = collect(llm)
    tokens = llm.stream([5, 6, 7], SamplingParams(max_tokens=500, ignore_eos=True))
    next(tokens)
    held = Holder(tokens)
    del tokens, held
    assert llm.stats().running == 1
    collect_there()
    while llm.stats().running:
        time.sleep(0.001)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_child_process(tiny_model: Path) -> None:
    program = f"""
import os, sys
from minipaged import LLM, EngineDeadError, SamplingParams
llm = LLM({str(tiny_model)!r})
if child := os.fork():
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    print(len(llm.generate("Why?", SamplingParams(max_tokens=3, ignore_eos=True))[0].token_ids))
else:
    try:
        llm.generate("Why?")
    except EngineDeadError as error:
        assert "child process" in str(error)
        sys.exit(7)
"""
    command = [sys.executable, "-W", "ignore", "-c", program]  # newer versions of Python warn of every such fork
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert (result.stdout, result.stderr) == ("7\n3\n", "")


def test_program_that_forgets_to_close(tiny_model: Path) -> None:
    program = f"""
from minipaged import LLM, SamplingParams
llm = LLM({str(tiny_model)!r})
print(len(llm.generate("Why?", SamplingParams(max_tokens=3, ignore_eos=True))[0].token_ids))
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert (result.stdout, result.stderr) == ("3\n", "")
