"""Finding stop strings in text that arrives piece by piece."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopMatcher:
    """Looks for stop strings in a text that arrives in pieces, and holds back what could still become one.

    The first stop string to be *complete* wins, so a match never waits for more text. Of several that are
    complete at the same character the longest wins. The result does not depend on how the text is cut.

    After each piece exactly the longest suffix that some stop string begins with is held back, never more.
    A piece costs O(its length), whatever the number and the length of the stop strings: the matcher is the
    automaton of Aho and Corasick, "Efficient string matching" (1975), whose state is that suffix.

    Args:
        stop: the stop strings; none is empty.

    Attributes:
        matched: the stop string that was found, if one was.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self.matched: str | None = None
        self._held = ""
        self._state = 0
        self._build(stop)

    def feed(self, text: str) -> str:
        """Take the next piece of text; return what may be shown now. Once a stop matched, nothing more is."""
        if self.matched is not None:
            return ""
        self._held += text
        state = self._state
        for position, character in enumerate(text, start=len(self._held) - len(text) + 1):
            while state and character not in self._edges[state]:
                state = self._fallback[state]
            state = self._edges[state].get(character, 0)
            stop = self._complete[state]
            if stop is not None:
                return self._match(stop, position)
        self._state = state
        return self._release(len(self._held) - self._depth[state])

    def finish(self) -> str:
        """The text ends here: return what was held back."""
        self._state = 0
        return self._release(len(self._held))

    def _match(self, stop: str, end: int) -> str:
        self.matched = stop
        shown = self._held[: end - len(stop)]
        self._held = ""
        return shown

    def _release(self, length: int) -> str:
        shown, self._held = self._held[:length], self._held[length:]
        return shown

    def _build(self, stop: Sequence[str]) -> None:
        """Build the automaton. State 0 is the empty string; the arrays are indexed by state."""
        self._edges: list[dict[str, int]] = [{}]
        self._depth = [0]  # length of the state's string
        self._complete: list[str | None] = [None]  # the longest stop string that the state's string ends with
        for string in stop:
            state = 0
            for character in string:
                if character not in self._edges[state]:
                    self._edges[state][character] = len(self._edges)
                    self._edges.append({})
                    self._depth.append(self._depth[state] + 1)
                    self._complete.append(None)
                state = self._edges[state][character]
            self._complete[state] = string

        self._fallback = [0] * len(self._edges)  # the state of the longest proper suffix that is a state
        queue = deque(self._edges[0].values())
        while queue:  # breadth first: a fallback is shorter, so it is known already
            state = queue.popleft()
            for character, child in self._edges[state].items():
                suffix = self._fallback[state]
                while suffix and character not in self._edges[suffix]:
                    suffix = self._fallback[suffix]
                self._fallback[child] = self._edges[suffix].get(character, 0)
                if self._complete[child] is None:
                    self._complete[child] = self._complete[self._fallback[child]]
                queue.append(child)
