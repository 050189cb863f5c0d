"""Charts as SVG: axes, lines, dots and bars.

Colours are CSS classes (``c0`` ... ``c6``), defined here for light and dark. A mark may carry a title, which browsers
show as a tooltip. ``Chart.svg`` is for a page that has ``STYLE``; ``Chart.file`` stands alone.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from markupsafe import Markup

from scripts.load_tester.reporting.sanitize import escape

WIDTH, HEIGHT = 480, 264
LEFT, RIGHT, TOP, BOTTOM = 80, 14, 14, 44
MAX_POINTS = 3000
MAX_LARGE = 30  # dots up to this number are drawn larger
MIN_TICKS = 4  # of a logarithmic axis
LETTER = 6.6  # mean width in pixels, for text without a browser's layout
PHONE = 1.4  # a narrow page enlarges letters by this factor, to keep them readable
COLOURS = {
    "light": "#3454d1 #d9692a #1f8a5b #8457b8 #b8860b #c2335c #98a2b3".split(),
    "dark": "#8fa5ff #f2995f #53c495 #b794e6 #e0b84c #f27a9b #667085".split(),
}
VARIABLES = {  # colours of text and lines, then of the data
    name: f"--ink: {ink}; --soft: {soft}; --line: {line}; "
    + " ".join(f"--c{n}: {colour};" for n, colour in enumerate(COLOURS[name]))
    for name, ink, soft, line in (("light", "#181c23", "#5a6372", "#e2e5ea"), ("dark", "#e6e9ee", "#9aa4b2", "#2a313b"))
}
STYLE = (
    f":root {{ {VARIABLES['light']} }} @media (prefers-color-scheme: dark) {{ :root {{ {VARIABLES['dark']} }} }} "
    "svg text { font: 12px system-ui, sans-serif; fill: var(--soft); } "
    "svg text.h { dominant-baseline: hanging; } svg text.e { text-anchor: end; } "
    "svg text.m { text-anchor: middle; } svg text.t { font-weight: 600; fill: var(--ink); } "
    ".g { stroke: var(--line); } "
    ".l { fill: none; stroke-width: 1.7; } .f { fill-opacity: .75; } .w { stroke-width: 5; opacity: .28; } "
    + " ".join(
        f".l.c{n} {{ stroke: var(--c{n}) }} .f.c{n} {{ fill: var(--c{n}) }} .w.c{n} {{ stroke: var(--c{n}) }}"
        for n in range(7)
    )
)
LIMIT = 5  # colour of a limit
Points = Sequence[tuple[float, float]]


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers between two bounds."""
    if not high > low:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = min((multiple * power for multiple in (1, 2, 5, 10)), key=lambda size: abs(size - rough))
    first = math.ceil(low / step - 1e-9)
    return [round(number * step, 12) for number in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2, 5, 10, ... between two positive bounds; more in a narrow range, only powers of ten in a wide one."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    choices: list[tuple[float, ...]] = [(1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 8)]
    for multiples in [(1,), *choices] if high / low >= 1e4 else choices:
        found = [m * 10.0**power for power in powers for m in multiples if low <= m * 10.0**power <= high]
        if len(found) >= MIN_TICKS:
            return found
    return ticks(low, high)


def number(value: float) -> str:
    """A tick's value in at most six letters: 12k for 12,000."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= max(size, 1e4):
            return f"{value / size:.3g}{letter}"
    if value and abs(value) < 0.001:
        return f"{value:.0e}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.4g}"


@dataclass
class Chart:
    """One pair of axes with its marks.

    Args:
        x_label, y_label: what the axes show, with unit.
        x, y: bounds; None to fit what is drawn.
        is_log_x, is_log_y: logarithmic axes; values below the lower bound are drawn on it.
        height, width, left: pixels; ``left`` is the margin for labels of the y axis.
        rows: labels of heights, instead of numbers.
        keys: further names of the legend, with their colours.
        finding: what the chart shows in this case, in a few words after its title.
    """

    x_label: str
    y_label: str
    x: tuple[float, float] | None = None
    y: tuple[float, float] | None = None
    is_log_x: bool = False
    is_log_y: bool = False
    height: int = HEIGHT
    width: int = WIDTH
    left: int = LEFT
    rows: dict[float, str] = field(default_factory=dict)
    keys: dict[str, int] = field(default_factory=dict)
    finding: str = ""
    _marks: list[tuple[str, Points, str, str]] = field(default_factory=list)
    _bars: list[tuple[float, float, float, str, str]] = field(default_factory=list)
    _intervals: list[tuple[float, float, float, str]] = field(default_factory=list)
    _limits: list[tuple[str, float]] = field(default_factory=list)

    def line(self, points: Points, colour: int, name: str = "", *, is_dashed: bool = False) -> None:
        """Add a line through points in order of x; ``name`` goes into the legend."""
        name += ", dashed" if name and is_dashed else ""
        self._marks.append(("dashed" if is_dashed else "line", _thinned(points), f"c{colour}", name))

    def dots(self, points: Points, colour: int, name: str = "") -> None:
        self._marks.append(("dots", _thinned(points), f"c{colour}", name))

    def interval(self, x: float, low: float, high: float, colour: int) -> None:
        """Add a vertical interval; a value below zero is drawn as zero."""
        self._intervals.append((x, max(0.0, low), max(0.0, high), f"c{colour}"))

    def limit(self, axis: Literal["x", "y"], value: float, name: str) -> None:
        """Add a dashed line across the chart at a value of one axis, which then covers it."""
        self._limits.append((axis, value))
        self.keys[name] = LIMIT

    def bar(self, y: float, begin: float, end: float, colour: int, title: str = "") -> None:
        """Add a horizontal bar at height ``y`` (Gantt)."""
        self._bars.append((y, begin, end, f"c{colour}", title))

    @property
    def names(self) -> list[tuple[str, str]]:
        """Colour class and name of each entry of the legend."""
        keys = [(f"c{colour}", name) for name, colour in self.keys.items()]
        return [(colour, name) for _, _, colour, name in self._marks if name] + keys

    def heading(self, title: str) -> str:
        """The title with the finding."""
        return f"{title}: {self.finding}" if self.finding else title

    def svg(self) -> Markup:
        """The chart for a page that has ``STYLE``, without title and legend."""
        label = escape(f"{self.y_label} over {self.x_label}")
        head = f'<svg viewBox="0 0 {self.width} {self.height}" role="img" aria-label="{label}">'
        return Markup(head + self._drawing() + "</svg>")

    def file(self, title: str) -> str:
        """The chart as a self-contained file with title and legend."""
        keys, x, y = "", float(self.left), 25
        for colour, name in self.names:
            length = 30 + LETTER * len(name)
            if x + length > self.width and x > self.left:
                x, y = float(self.left), y + 16
            keys += f'<rect class="f {colour}" x="{x:.0f}" y="{y}" width="10" height="10"/>'
            keys += f'<text x="{x + 14:.0f}" y="{y + 9}">{escape(name)}</text>'
            x += length
        head = y + 11
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height + head}" '
            f'width="{self.width}" role="img"><style>{STYLE}</style>'
            f'<text class="t" x="{self.left}" y="14">{escape(self.heading(title))}</text>{keys}'
            f'<g transform="translate(0,{head})">{self._drawing()}</g></svg>\n'
        )

    def _drawing(self) -> str:
        x, y = self._bounds()
        to_x = _Scale(x, (self.left, self.width - RIGHT), self.is_log_x)
        to_y = _Scale(y, (self.height - BOTTOM, TOP), self.is_log_y)
        parts = self._grid(x, y, to_x, to_y) + self._extras(x, to_x, to_y)
        parts += [self._mark(mark, to_x, to_y) for mark in self._marks]
        size = max(1.0, min(10.0, (self.height - TOP - BOTTOM) / max(1, len({bar[0] for bar in self._bars})) - 0.6))
        for at, begin, end, colour, title in self._bars:
            width = max(0.8, to_x(end) - to_x(begin))
            label = f"<title>{escape(title)}</title>" if title else ""
            parts.append(
                f'<rect class="f {colour}" x="{to_x(begin):.1f}" y="{to_y(at) - size / 2:.1f}" width="{width:.1f}" '
                f'height="{size:.1f}">{label}</rect>'
            )
        return "".join(parts)

    def _bounds(self) -> tuple[tuple[float, float], tuple[float, float]]:
        points = [point for _, mark, _, _ in self._marks for point in mark]
        xs = (
            [px for px, _ in points]
            + [at for axis, at in self._limits if axis == "x"]
            + [edge for _, begin, end, _, _ in self._bars for edge in (begin, end)]
        )
        ys = (
            [py for _, py in points]
            + [at for axis, at in self._limits if axis == "y"]
            + [bar[0] + half for bar in self._bars for half in (-0.5, 0.5)]
        )
        ys += [end for _, low, high, _ in self._intervals for end in (low, high)]
        return self.x or _fit(xs, self.is_log_x), self.y or _fit(ys, self.is_log_y)

    def _grid(self, x: tuple[float, float], y: tuple[float, float], to_x: "_Scale", to_y: "_Scale") -> list[str]:
        bottom = self.height - BOTTOM
        parts = []
        right = self.width - RIGHT
        heights = {} if self._bars else {v: number(v) for v in (log_ticks(*y) if self.is_log_y else ticks(*y))}
        for value, name in (self.rows or heights).items():
            at = to_y(value)
            parts.append(f'<line class="g" x1="{self.left}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"/>')
            parts.append(f'<text class="e" x="{self.left - 6}" y="{at + 3:.1f}">{escape(name)}</text>')
        parts += self._x_ticks(x, to_x)
        middle = (self.left + right) / 2
        parts.append(f'<text class="m x" x="{middle}" y="{self.height - 4}">{escape(self.x_label)}</text>')
        height = (TOP + bottom) / 2
        label = escape(self.y_label)
        if not self._bars:
            parts.append(f'<text class="m y" x="14" y="{height}" transform="rotate(-90 14 {height})">{label}</text>')
        return parts

    def _x_ticks(self, x: tuple[float, float], to_x: "_Scale") -> list[str]:
        """Lines of the grid with their values, except where these would touch on a phone."""
        parts = []
        bottom = self.height - BOTTOM
        letter = LETTER * PHONE * max(1.0, self.width / WIDTH)
        taken = -math.inf
        for value in log_ticks(*x) if self.is_log_x else ticks(*x, 6):
            at, words = to_x(value), number(value)
            half = letter * len(words) / 2
            parts.append(f'<line class="g" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{bottom}"/>')
            if at - half > taken:
                taken = at + half + letter / 2
                at = min(at, self.width - half)  # the last value stays inside
                parts.append(f'<text class="m h" x="{at:.1f}" y="{bottom + 9}">{words}</text>')
        return parts

    def _extras(self, x: tuple[float, float], to_x: "_Scale", to_y: "_Scale") -> list[str]:
        """Intervals, and limits inside the axes."""
        parts = [
            f'<line class="w {colour}" x1="{to_x(at):.1f}" x2="{to_x(at):.1f}" '
            f'y1="{to_y(low):.1f}" y2="{to_y(high):.1f}"/>'
            for at, low, high, colour in self._intervals
        ]
        for axis, value in self._limits:
            own = (to_x(x[0]), to_x(x[1]), to_y(value), to_y(value))
            own = (to_x(value), to_x(value), TOP, self.height - BOTTOM) if axis == "x" else own
            x1, x2, y1, y2 = (f"{place:.1f}" for place in own)
            parts.append(f'<line class="l c{LIMIT}" stroke-dasharray="7 4" x1="{x1}" x2="{x2}" y1="{y1}" y2="{y2}"/>')
        return parts

    def _mark(self, mark: tuple[str, Points, str, str], to_x: "_Scale", to_y: "_Scale") -> str:
        kind, points, colour, _ = mark
        if kind == "dots":
            radius = 1.8 if len(points) > MAX_LARGE else 3
            dots = "".join(f'<circle cx="{to_x(px):.1f}" cy="{to_y(py):.1f}" r="{radius}"/>' for px, py in points)
            return f'<g class="f {colour}">{dots}</g>'
        path = "M" + " L".join(f"{to_x(px):.1f},{to_y(py):.1f}" for px, py in points) if points else ""
        dashes = ' stroke-dasharray="5 4"' if kind == "dashed" else ""
        return f'<path class="l {colour}" d="{path}"{dashes}/>'


class _Scale:
    """Maps values to pixels."""

    def __init__(self, values: tuple[float, float], pixels: tuple[float, float], is_log: bool) -> None:
        self._is_log = is_log
        self._floor = values[0]
        low, high = (math.log10(value) for value in values) if is_log else values
        self._low, self._span = low, (high - low) or 1.0
        self._from, self._length = pixels[0], pixels[1] - pixels[0]

    def __call__(self, value: float) -> float:
        if self._is_log:
            value = math.log10(max(value, self._floor))
        return self._from + (value - self._low) / self._span * self._length


def _fit(values: Sequence[float], is_log: bool) -> tuple[float, float]:
    finite = [value for value in values if math.isfinite(value) and (value > 0 or not is_log)]
    if not finite:
        return (0.1, 1.0) if is_log else (0.0, 1.0)
    low, high = min(finite), max(finite)
    if is_log:
        return low * 0.9, max(high * 1.1, low * 1.5)
    low = min(0.0, low)
    return low, high * 1.05 if high > low else low + 1.0


def _thinned(points: Points) -> Points:
    """Thin many points to the first, lowest and highest of each stretch, so that no spike is lost."""
    width = -(-3 * len(points) // MAX_POINTS)
    if width <= 3:
        return points
    kept: list[tuple[float, float]] = []
    for begin in range(0, len(points), width):
        heights = [y for _, y in points[begin : begin + width]]
        places = {0, heights.index(min(heights)), heights.index(max(heights))}
        kept += [points[begin + place] for place in sorted(places)]
    return [*kept, points[-1]]
