"""Line charts and bars as inline SVG: no library, no network, theme colours from the page."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 380, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 12, 10, 22  # room for the axes' numbers
_MOST_POINTS = 400  # per line; more cannot be told apart at this size
_MOST_DOTS = 40  # beyond that many points a line without dots is clearer


@dataclass(frozen=True)
class Series:
    """One line: ``values[i]`` at ``steps[i]``. Values that are not finite leave a gap."""

    label: str
    steps: Sequence[int]
    values: Sequence[float]
    style: str = "a"  # a | b: the page's first or second colour


def short_number(value: float, digits: int = 4) -> str:
    """Number with this many significant digits: ``0.75``, ``12.3``, ``1e-05``, ``1,234``."""
    if not math.isfinite(value):
        return "–"
    if value != 0 and (abs(value) >= 1e6 or abs(value) < 1e-3):
        return f"{value:.3g}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten) inside ``[low, high]``, about ``count``."""
    if not high > low:
        return [low]
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def thin_out(points: list[tuple[int, float]], most: int = _MOST_POINTS) -> list[tuple[int, float]]:
    """Keep about ``most`` points: each bucket's lowest and highest, first and last."""
    if len(points) <= most:
        return points
    size = math.ceil(2 * len(points) / most)
    kept: set[tuple[int, float]] = {points[0], points[-1]}
    for start in range(0, len(points), size):
        bucket = points[start : start + size]
        kept.add(min(bucket, key=lambda point: point[1]))
        kept.add(max(bucket, key=lambda point: point[1]))
    return sorted(kept)


def line_chart(series: Sequence[Series], shows: Sequence[float] = ()) -> str:
    """An SVG of lines over steps. Empty text when no series has a finite value.

    ``shows``: values that the axis reaches in any case, so that charts can be compared.
    """
    drawn = [(one, _finite(one)) for one in series]
    everything = [point for _, points in drawn for point in points]
    if not everything:
        return ""
    scale = _Scale.around([*everything, *((everything[0][0], value) for value in shows)])
    parts = [_axes(scale)]
    hover = []
    for one, points in drawn:
        if not points:
            continue
        thin = thin_out(points)
        parts.append(_line(scale, one, thin))
        hover.append({"l": one.label, "s": one.style, "p": [[*scale.at(p), *p] for p in thin]})
    data = escape(json.dumps(hover), quote=True)
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" data-lines="{data}">'
        f"{''.join(parts)}</svg>"
    )


@dataclass(frozen=True)
class _Scale:
    first: float
    last: float
    low: float
    high: float

    @classmethod
    def around(cls, points: Sequence[tuple[int, float]]) -> "_Scale":
        """Axes that show all points, with a margin above and below."""
        low, high = min(value for _, value in points), max(value for _, value in points)
        margin = (high - low) * 0.08 or abs(high) * 0.1 or 1.0
        first, last = min(step for step, _ in points), max(step for step, _ in points)
        return cls(first, last if last > first else first + 1, low - margin, high + margin)

    def at(self, point: tuple[int, float]) -> tuple[float, float]:
        """Pixel position of (step, value)."""
        x = (point[0] - self.first) / (self.last - self.first)
        y = (point[1] - self.low) / (self.high - self.low)
        return (
            round(_LEFT + x * (WIDTH - _LEFT - _RIGHT), 1),
            round(HEIGHT - _BOTTOM - y * (HEIGHT - _TOP - _BOTTOM), 1),
        )


def _finite(series: Series) -> list[tuple[int, float]]:
    pairs = zip(series.steps, series.values, strict=True)
    return [(step, value) for step, value in pairs if math.isfinite(value)]


def _axes(scale: _Scale) -> str:
    parts = []
    for value in ticks(scale.low, scale.high):
        _, y = scale.at((int(scale.first), value))
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 3.5}" class="y">{short_number(value)}</text>')
    for step in _step_ticks(scale.first, scale.last):
        x, _ = scale.at((int(step), scale.low))
        parts.append(f'<text x="{x}" y="{HEIGHT - 6}" class="x">{int(step):,}</text>')
    return "".join(parts)


def _step_ticks(first: float, last: float) -> list[float]:
    """Whole steps to name on the axis, the last one always among them."""
    span = last - first
    inner = [s for s in ticks(first, last) if s == int(s) and last - s > 0.1 * span]
    return [*inner, last]


def _line(scale: _Scale, series: Series, points: list[tuple[int, float]]) -> str:
    path = "".join(f"{'L' if i else 'M'}{x} {y}" for i, (x, y) in enumerate(map(scale.at, points)))
    drawn = f'<path class="line {series.style}" d="{path}"/>'
    if len(points) <= _MOST_DOTS:
        dots = (f'<circle cx="{x}" cy="{y}" r="2.4"/>' for x, y in map(scale.at, points))
        drawn += f'<g class="dots {series.style}">{"".join(dots)}</g>'
    return drawn


def bars(parts: Sequence[tuple[str, float]], unit: str) -> str:
    """Horizontal bars, the largest first, each with its amount and its share of the sum."""
    total = sum(amount for _, amount in parts) or 1.0
    largest = max((amount for _, amount in parts), default=1.0) or 1.0
    rows = (
        f"<tr><th>{escape(name)}</th>"
        f'<td class="bar"><div style="width:{100 * amount / largest:.1f}%"></div></td>'
        f'<td class="number">{short_number(amount)} {escape(unit)}</td>'
        f'<td class="number">{100 * amount / total:.0f} %</td></tr>'
        for name, amount in sorted(parts, key=lambda part: -part[1])
    )
    return f'<table class="bars">{"".join(rows)}</table>'
