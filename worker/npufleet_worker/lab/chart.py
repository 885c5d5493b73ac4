"""A line chart as SVG text. Knows nothing of what the numbers mean."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

_WIDTH, _HEIGHT = 860, 460
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 210, 46, 56
_COLOURS = ("#0b6e99", "#d9730d", "#4d8a3d", "#8a4fbf", "#b3123b", "#6b7280", "#a88400", "#17897c")
_TICKS = 6


@dataclass(frozen=True, slots=True)
class Series:
    """One line, from left to right; `bold` for the one that matters, `marks` for single points."""

    name: str
    points: tuple[tuple[float, float], ...]
    bold: bool = False
    marks: bool = False


@dataclass(frozen=True, slots=True)
class Axis:
    """A scale from 0 to `most`; what is beyond is cut off."""

    label: str
    most: float


def draw(
    series: Sequence[Series], *, title: str, x: Axis, y: Axis, limit: tuple[str, float]
) -> str:
    """The chart, with a dashed line at the height of the limit (its name and value)."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" '
        f'viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" font-size="12">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        _text(_LEFT, 26, title, size=15),
        *_grid(x, y),
        *_limit(*limit, y),
    ]
    for place, line in enumerate(series):
        parts += _line(line, _COLOURS[place % len(_COLOURS)], place, x, y)
    return "\n".join([*parts, "</svg>", ""])


def ticks(most: float) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten apart) from 0 to `most`."""
    rough = most / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    return [step * count for count in range(math.floor(most / step + 1e-9) + 1)]


def _grid(x: Axis, y: Axis) -> Iterator[str]:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    for tick in ticks(y.most):
        at = _y(tick, y)
        yield f'<path d="M{_LEFT} {at:.1f}H{right}" stroke="#e5e7eb"/>'
        yield _text(_LEFT - 8, at + 4, f"{tick:g}", anchor="end")
    for tick in ticks(x.most):
        at = _x(tick, x)
        yield f'<path d="M{at:.1f} {bottom}v5" stroke="#6b7280"/>'
        yield _text(at, bottom + 20, f"{tick:g}", anchor="middle")
    yield f'<path d="M{_LEFT} {_TOP}V{bottom}H{right}" fill="none" stroke="#6b7280"/>'
    yield _text((_LEFT + right) / 2, _HEIGHT - 12, x.label, anchor="middle")
    yield _text(12, _TOP - 6, y.label)


def _limit(name: str, value: float, y: Axis) -> Iterator[str]:
    if value <= y.most:
        at, right = _y(value, y), _WIDTH - _RIGHT
        dashed = 'stroke="#111827" stroke-dasharray="6 4"'
        yield f'<path d="M{_LEFT} {at:.1f}H{right}" {dashed}/>'
        yield _text(right - 4, at - 6, name, anchor="end")


def _line(line: Series, colour: str, place: int, x: Axis, y: Axis) -> Iterator[str]:
    inside = [(px, py) for px, py in line.points if px <= x.most and py <= y.most]
    spots = [(_x(px, x), _y(py, y)) for px, py in inside]
    width = 3 if line.bold else 1.5
    if not line.marks and spots:
        path = "L".join(f"{px:.1f} {py:.1f}" for px, py in spots)
        yield f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="{width}"/>'
    radius = 6 if line.marks else width
    for px, py in spots:
        yield f'<circle cx="{px:.1f}" cy="{py:.1f}" r="{radius}" fill="{colour}"/>'
    at = _TOP + 18 * place + 6
    left = _WIDTH - _RIGHT + 14
    yield f'<rect x="{left}" y="{at - 9}" width="10" height="10" fill="{colour}"/>'
    yield _text(left + 16, at, line.name, bold=line.bold)


def _text(
    x: float, y: float, words: str, *, anchor: str = "start", size: int = 12, bold: bool = False
) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"{weight} '
        f'fill="#111827">{escape(words)}</text>'
    )


def _x(value: float, axis: Axis) -> float:
    return _LEFT + value / axis.most * (_WIDTH - _LEFT - _RIGHT)


def _y(value: float, axis: Axis) -> float:
    return _HEIGHT - _BOTTOM - value / axis.most * (_HEIGHT - _TOP - _BOTTOM)
