"""Coordinates of line charts and bars, which ``templates/parts.html`` draws as inline SVG."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

WIDTH, HEIGHT = 380, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 12, 10, 22  # space for the labels of the axes
_MAX_POINTS = 400  # per line. More cannot be distinguished at this size
_MAX_DOTS = 40  # a line with more points is clearer without dots


@dataclass(frozen=True)
class Series:
    """A line of a chart, with ``values[i]`` at ``steps[i]``. NaN and infinity are not drawn."""

    label: str
    steps: Sequence[int]
    values: Sequence[float]
    style: str = "a"  # a | b: the page's first or second colour

    @property
    def finite_points(self) -> list[tuple[int, float]]:
        """Pairs (step, value) with finite values."""
        pairs = zip(self.steps, self.values, strict=True)
        return [(step, value) for step, value in pairs if math.isfinite(value)]

    @property
    def constant(self) -> float | None:
        """The value of the series if all finite values are equal, else None."""
        values = {value for _, value in self.finite_points}
        return values.pop() if len(values) == 1 else None


def collect_series(metrics: Sequence[Mapping[str, float]]) -> dict[str, Series]:
    """Return the series of each metric by full name, from the lines of ``metrics.jsonl``."""
    columns: dict[str, tuple[list[int], list[float]]] = {}
    for line in metrics:
        for name, value in line.items():
            if name != "step":
                steps, values = columns.setdefault(name, ([], []))
                steps.append(int(line["step"]))
                values.append(float(value))
    return {name: Series("", steps, values) for name, (steps, values) in columns.items()}


def lines_of(series: Mapping[str, Series], metric: str, held_out: str) -> list[Series]:
    """Return a metric's series in training and in validation, with a label and colour for each.

    ``metric``: name after the slash, such as ``rewards``. ``held_out``: label for validation.
    """
    groups = (
        ("train_rollouts", "training", "a"),
        ("train_optim", "training", "a"),
        ("val_rollouts", held_out, "b"),
        ("val_optim", held_out, "b"),
    )
    return [
        Series(label, values.steps, values.values, style)
        for group, label, style in groups
        if (values := series.get(f"{group}/{metric}")) is not None
    ]


def short_number(value: float, digits: int = 4) -> str:
    """Format a number with ``digits`` significant digits: ``0.75``, ``1e-05``, ``1,234``."""
    if not math.isfinite(value):
        return "–"
    if value != 0 and (abs(value) >= 1e6 or abs(value) < 1e-3):
        return f"{value:.3g}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def tick_labels(values: Sequence[float]) -> list[str]:
    """Format ``values`` with four digits, or with more if labels would otherwise be equal."""
    labels, digits = [short_number(value) for value in values], 4
    while len(set(labels)) < len(set(values)) and digits < 17:
        digits += 1
        labels = [f"{value:,.{digits}g}" for value in values]
    return labels


@dataclass(frozen=True)
class Change:
    """The difference between two values of a metric as text, and whether it is an improvement."""

    text: str
    mood: str  # "up": improvement, "down": deterioration, "": neither

    @classmethod
    def between(cls, start: float, end: float, better: int) -> "Change":
        """Return ``end - start``. ``better``: 1 if larger is better, -1 if smaller is, else 0."""
        change = end - start
        if not math.isfinite(change) or not change:
            return cls("–" if change else "±0", "")
        mood = "" if not better else "up" if change * better > 0 else "down"
        return cls(f"{'+' if change > 0 else '−'}{short_number(abs(change), 3)}", mood)


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return about ``count`` round numbers in ``[low, high]``: multiples of 1, 2 or 5 · 10^n."""
    if not high > low:
        return [low]
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{index * step:.12g}") for index in range(first, last + 1)]


def thin_out(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Select at most about 400 points: both ends, and the extrema of each interval of steps."""
    if len(points) <= _MAX_POINTS:
        return points
    size = math.ceil(2 * len(points) / _MAX_POINTS)
    selected: set[tuple[int, float]] = {points[0], points[-1]}
    for start in range(0, len(points), size):
        bucket = points[start : start + size]
        selected.add(min(bucket, key=lambda point: point[1]))
        selected.add(max(bucket, key=lambda point: point[1]))
    return sorted(selected)


@dataclass(frozen=True)
class Line:
    """A line of a chart, with coordinates in pixels."""

    style: str
    path: str  # attribute ``d`` of an SVG path
    dots: Sequence[tuple[float, float]]  # empty for a line with many points


@dataclass(frozen=True)
class Chart:
    """A line chart over steps, with coordinates in pixels from the upper left corner."""

    value_ticks: Sequence[tuple[float, str]]  # y and label
    step_ticks: Sequence[tuple[float, str]]  # x and label
    lines: Sequence[Line]
    hover: str  # JSON: label, style and points of each line, for templates/hover.js
    width: int = WIDTH
    height: int = HEIGHT
    left: int = _LEFT
    right: int = WIDTH - _RIGHT


def line_chart(series: Sequence[Series], shows: Sequence[float] = ()) -> Chart | None:
    """Return the chart of ``series``, or None if no series has a finite value.

    ``shows``: values that the value axis always includes, so that charts can be compared.
    """
    lines_with_points = [(line, points) for line in series if (points := line.finite_points)]
    if not lines_with_points:
        return None
    # Ranges of the axes. The margin is 8 % of the range, or for constant values 10 % or 1.
    all_points = [point for _, points in lines_with_points for point in points]
    all_values = [*shows, *(value for _, value in all_points)]
    margin = (max(all_values) - min(all_values)) * 0.08 or abs(max(all_values)) * 0.1 or 1.0
    low, high = min(all_values) - margin, max(all_values) + margin
    first = min(all_points)[0]
    last = max(first + 1, max(all_points)[0])  # at least one step wide

    def pixel(step: float, value: float) -> tuple[float, float]:
        x, y = (step - first) / (last - first), (value - low) / (high - low)
        width, height = WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM
        return round(_LEFT + x * width, 1), round(HEIGHT - _BOTTOM - y * height, 1)

    tick_values = ticks(low, high)
    # Labels of the step axis: the last step, and whole steps that are not too near to it.
    steps = [s for s in ticks(first, last) if s == int(s) and last - s > 0.1 * (last - first)]
    # Each line as an SVG path, and the values that the page shows at the pointer.
    lines, hover = [], []
    for line, points in lines_with_points:
        points = thin_out(points)
        dots = [pixel(*point) for point in points]
        path = "M" + "L".join(f"{x} {y}" for x, y in dots)
        lines.append(Line(line.style, path, dots if len(dots) <= _MAX_DOTS else ()))
        marks = [[*dot, *point] for dot, point in zip(dots, points, strict=True)]
        hover.append({"l": line.label, "s": line.style, "p": marks})
    return Chart(
        value_ticks=[
            (pixel(first, value)[1], label)
            for value, label in zip(tick_values, tick_labels(tick_values), strict=True)
        ],
        step_ticks=[(pixel(step, low)[0], f"{int(step):,}") for step in [*steps, last]],
        lines=lines,
        hover=json.dumps(hover),
    )


@dataclass(frozen=True)
class ChartCard:
    """A chart in the report, with title and description."""

    heading: str
    lead: str
    tooltip: str
    lines: Sequence[Series]
    shows: Sequence[float] = ()  # values that the value axis includes in any case
    is_single: bool = False  # the heading shows the latest value instead of a legend

    @cached_property
    def chart(self) -> Chart | None:
        """The chart, or None if no line has a finite value."""
        return line_chart(self.lines, self.shows)


def drawn(cards: Iterable[ChartCard]) -> list[ChartCard]:
    """Return the cards that have a chart."""
    return [card for card in cards if card.chart is not None]


@dataclass(frozen=True)
class Bar:
    """A bar of a bar chart."""

    name: str
    amount: float
    width: float  # per cent of the largest amount
    share: float  # per cent of the sum


def bars(parts: Sequence[tuple[str, float]]) -> list[Bar]:
    """Return a bar for each (name, amount), largest amount first."""
    total = sum(amount for _, amount in parts) or 1.0
    largest = max((amount for _, amount in parts), default=1.0) or 1.0
    return [
        Bar(name, amount, 100 * amount / largest, 100 * amount / total)
        for name, amount in sorted(parts, key=lambda part: -part[1])
    ]
