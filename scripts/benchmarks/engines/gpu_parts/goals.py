"""The goals of the CUDA path, each as the worst ratio among the figures of a run."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

Figures = Mapping[str, float]

#: Batch sizes of the goals for decode steps, and the prompt of the goal for prefill.
MAX_BATCH = 64
PROMPT = 8192


class Goal(NamedTuple):
    """A ratio that should be at least ``least``; ``where`` it is worst."""

    name: str
    least: float
    worst: float
    where: str

    @property
    def line(self) -> str:
        verdict = "reached" if self.worst >= self.least else "missed"
        return f"goal {verdict}: {self.name}: {self.worst:.1%} of at least {self.least:.0%} ({self.where})"


def goals(figures: Figures) -> Iterator[Goal]:
    """The goals of which something was measured."""
    for name, least, ratios in (
        ("decode steps, of what memory allows", 0.80, _decode_steps),
        (f"prefill of {PROMPT} tokens, of the rate of matrix products", 0.65, _prefills),
        ("steps with overlap, device time of the whole time", 0.97, _overlapped_steps),
        ("attention of decode rows, of torch's", 0.85, partial(_attention, kind="decode")),
        ("attention of prompts, of torch's", 0.65, partial(_attention, kind="prompt")),
    ):
        if found := [(ratio, where) for where, ratio in ratios(figures)]:
            yield Goal(name, least, *min(found))


Ratios = Iterator[tuple[str, float]]


def _of_limit(figures: Figures, is_meant: Callable[[str], bool]) -> Ratios:
    for name, value in figures.items():
        item, _, unit = name.rpartition(", ")
        if unit == "of limit" and is_meant(item):
            yield item, value


def _decode_steps(figures: Figures) -> Ratios:
    def is_meant(item: str) -> bool:
        _, _, step = item.partition(", ")
        return step.startswith("decode batch ") and int(step.split()[2]) <= MAX_BATCH

    return _of_limit(figures, is_meant)


def _prefills(figures: Figures) -> Ratios:
    return _of_limit(figures, lambda item: item.endswith(f", prefill {PROMPT}"))


def _overlapped_steps(figures: Figures) -> Ratios:
    """The device alone is measured by steps that are all launched in advance, with the shortest context as these."""
    for name, whole_us in figures.items():
        shape, _, rest = name.partition(", with graphs, ")
        batch, _, unit = rest.partition(", ")
        step = f"{shape}, decode {batch} of "
        alone = [value for other, value in figures.items() if other.startswith(step) and other.endswith(", ms")]
        if unit == "us with overlap" and alone:
            yield f"{shape}, {batch}", min(alone) * 1e3 / whole_us


def _attention(figures: Figures, kind: str) -> Ratios:
    for name, ours_ms in figures.items():
        if f", attention, {kind} " in name and name.endswith(", auto, ms"):
            item = name.removesuffix(", auto, ms")
            if (sdpa_ms := figures.get(f"{item}, sdpa, ms")) is not None:
                yield item, sdpa_ms / ours_ms
