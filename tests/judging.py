"""A fake language model for tests: it writes what a script says and judges by counting the words of a description."""

import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pluralign import DataError, SamplingOptions
from pluralign.text.causal import Choice, Completion
from pluralign.votes.prompts import PromptLike


def by_words(prompt: str) -> float:
    """Return the probability of A: that of the response with more words of the description."""
    description, rest = prompt.split("\n\nQuestion:", 1)
    a, b = rest.split("Response A:")[1].split("\n\nWhich response")[0].split("\n\nResponse B:")
    wanted = set(re.findall(r"[a-z]{5,}", description.lower())) - {"description", "person"}
    count = [sum(word in text.lower() for word in wanted) for text in (a, b)]
    return 0.5 if count[0] == count[1] else float(count[0] > count[1])


@dataclass
class Parrot:
    """A judge that is also a writer."""

    writes: Callable[[str], str] = lambda prompt: "Name: Nobody\nDescription: likes nothing"
    judges: Callable[[str], float] = by_words
    fails: int = 0
    """Number of calls that fail, from the first on."""
    name: str = "parrot"
    asked: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def prepare(self) -> None:
        pass

    def sample(self, prompt: PromptLike, n: int, options: SamplingOptions, seed: int) -> list[Completion]:
        return [Completion(self.writes(str(prompt)))] * n

    def choose(self, prompt: PromptLike, letters: Sequence[str]) -> Choice:
        with self.lock:
            self.asked.append(str(prompt))
            if len(self.asked) <= self.fails:
                raise DataError("the server is asleep")
        return Choice(self.judges(str(prompt)), 7, 1)
