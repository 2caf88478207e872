"""Fair figures on a noisy machine: each setting takes its turn in each repeat, so that a slow minute hits all alike.

Compare by `ratio`: both figures of a pair come from the same repeat.
"""

import sys
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Generic, TypeVar

from tqdm import tqdm

S = TypeVar("S", bound=Hashable)
T = TypeVar("T")


@dataclass(frozen=True)
class Figures(Generic[S]):
    """What each repeat measured: setting → one mapping of figures a repeat."""

    by_setting: Mapping[S, Sequence[Mapping[str, float]]]

    def all(self, setting: S, figure: str) -> list[float]:
        return [turn[figure] for turn in self.by_setting[setting]]

    def median(self, setting: S, figure: str) -> float:
        return median(self.all(setting, figure))

    def ratio(self, setting: S, figure: str, to: S) -> float:
        """How many times the figure of `to`: the median of the repeats' own ratios."""
        pairs = zip(self.all(setting, figure), self.all(to, figure), strict=True)
        return median(ours / theirs for ours, theirs in pairs)

    def listed(self) -> list[dict[str, Any]]:
        """For a report's data, where keys have to be text."""
        return [{"setting": setting, "turns": turns} for setting, turns in self.by_setting.items()]


def take_turns(
    settings: Sequence[S], repeats: int, measure: Callable[[S], Mapping[str, float]], label: str
) -> Figures[S]:
    """`repeats` rounds through all `settings`, in turns; a bar on stderr tells how far it is."""
    turns: dict[S, list[Mapping[str, float]]] = {setting: [] for setting in settings}
    for setting in progress([setting for _ in range(repeats) for setting in settings], label):
        turns[setting].append(measure(setting))
    return Figures(turns)


def progress(items: Sequence[T], label: str) -> Iterable[T]:
    bar: Iterable[T] = tqdm(items, desc=label, file=sys.stderr, leave=False)
    return bar


def percentile(values: Sequence[float], percent: float) -> float:
    """The value that so many percent of `values` don't exceed."""
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * percent / 100), len(ordered) - 1)]
