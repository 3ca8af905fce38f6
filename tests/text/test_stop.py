from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from minipaged.text.stop import StopMatcher, StopStrings

strings = st.text("ab", min_size=1, max_size=4)


def first_match(text: str, stop: list[str]) -> tuple[int, str] | None:
    """The end of the first stop string to be complete, and the longest one that ends there."""
    for end in range(1, len(text) + 1):
        complete = [string for string in stop if text[:end].endswith(string)]
        if complete:
            return end, max(complete, key=len)
    return None


def could_become_a_stop(text: str, stop: list[str]) -> str:
    """The longest suffix of `text` that a stop string begins with and goes on from."""
    starts = (text[cut:] for cut in range(len(text)))
    return next((s for s in starts if any(string.startswith(s) and string != s for string in stop)), "")


@given(st.lists(st.text("ab", max_size=5), max_size=12), st.lists(strings, max_size=4))
@example(["a", "ab"], ["aab", "ab"])
@example(["ab", "c"], ["abc", "b"])
def test_equals_the_plain_definition_after_every_piece(pieces: list[str], stop: list[str]) -> None:
    matcher = StopMatcher(StopStrings(stop))
    text = shown = ""
    for piece in pieces:
        text += piece
        shown += matcher.feed(piece)
        match first_match(text, stop):
            case (end, string):
                assert matcher.matched == string
                assert shown == text[: end - len(string)]
            case None:
                assert matcher.matched is None
                assert shown + could_become_a_stop(text, stop) == text
    shown += matcher.finish()
    if matcher.matched is None:
        assert shown == text


def test_a_complete_stop_does_not_wait_for_a_longer_one() -> None:
    matcher = StopMatcher(StopStrings(["abcdef", "cd"]))
    assert matcher.feed("abcd") == "ab"
    assert matcher.matched == "cd"


def test_nothing_is_shown_after_a_stop() -> None:
    matcher = StopMatcher(StopStrings(["\n\n"]))
    assert matcher.feed("yes\n\nno") == "yes"
    assert matcher.feed("no") == ""
    assert matcher.finish() == ""


def test_only_text_that_could_become_a_stop_is_held_back() -> None:
    matcher = StopMatcher(StopStrings(["</answer>"]))
    assert matcher.feed("a < b </ans") == "a < b "
    assert matcher.feed("wers>") == "</answers>"
