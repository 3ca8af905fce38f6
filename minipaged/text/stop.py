"""Finding stop strings in text that arrives piece by piece."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopStrings:
    """Stop strings made ready to be looked for, once for any number of texts.

    The automaton of Aho and Corasick, "Efficient string matching" (1975): its state is the longest suffix of the text
    that some stop string begins with. State 0 is the empty string; the lists are indexed by state.

    Args:
        strings: none is empty.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self.edges: list[dict[str, int]] = [{}]
        self.depth = [0]  # length of the state's string
        self.complete: list[str | None] = [None]  # the longest stop string that the state's string ends with
        for string in strings:
            state = 0
            for character in string:
                if character not in self.edges[state]:
                    self.edges[state][character] = len(self.edges)
                    self.edges.append({})
                    self.depth.append(self.depth[state] + 1)
                    self.complete.append(None)
                state = self.edges[state][character]
            self.complete[state] = string

        self.fallback = [0] * len(self.edges)  # the state of the longest proper suffix that is a state
        queue = deque(self.edges[0].values())
        while queue:  # breadth first: a fallback is shorter, so it is known already
            state = queue.popleft()
            for character, child in self.edges[state].items():
                suffix = self.fallback[state]
                while suffix and character not in self.edges[suffix]:
                    suffix = self.fallback[suffix]
                self.fallback[child] = self.edges[suffix].get(character, 0)
                if self.complete[child] is None:
                    self.complete[child] = self.complete[self.fallback[child]]
                queue.append(child)


class StopMatcher:
    """Looks for stop strings in a text that arrives in pieces, and holds back what could still become one.

    The first stop string to be *complete* wins, so a match never waits for more text. Of several that are
    complete at the same character the longest wins. The result does not depend on how the text is cut.

    After each piece exactly the longest suffix that some stop string begins with is held back, never more.
    A piece costs O(its length), whatever the number and the length of the stop strings.

    Attributes:
        matched: the stop string that was found, if one was.
    """

    def __init__(self, strings: StopStrings) -> None:
        self.matched: str | None = None
        self._strings = strings
        self._held = ""
        self._state = 0

    def feed(self, text: str) -> str:
        """Take the next piece of text; return what may be shown now. Once a stop matched, nothing more is."""
        if self.matched is not None:
            return ""
        self._held += text
        strings, state = self._strings, self._state
        for position, character in enumerate(text, start=len(self._held) - len(text) + 1):
            while state and character not in strings.edges[state]:
                state = strings.fallback[state]
            state = strings.edges[state].get(character, 0)
            stop = strings.complete[state]
            if stop is not None:
                return self._match(stop, position)
        self._state = state
        return self._release(len(self._held) - strings.depth[state])

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
