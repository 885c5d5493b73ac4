"""A chart of bars on a logarithmic axis, as SVG: requests a second by case, with their range.

Pure: rows in, text out. Knows nothing of files.
"""

import math
from collections.abc import Sequence
from html import escape

from bench.results import Row, summaries

_LABELS_PX, _BARS_PX, _FIGURES_PX = 330, 420, 110
_LINE_PX, _HEADING_PX, _TOP_PX = 18, 26, 40
_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#222}.title{font-size:15px;font-weight:600}"
    ".bar{fill:#3b7dd8}.range{stroke:#16345e;stroke-width:2}.grid{stroke:#ddd}.tick{fill:#777}"
)


def svg(rows: Sequence[Row], *, title: str) -> str:
    """A bar per case with the median rate, a line over the range of its pairs, decades below."""
    shown = [(row, group) for row, group in summaries(rows) if row.rate_s > 0]
    top = 10 ** math.ceil(math.log10(max((g.rate_s for _, gs in shown for g in gs), default=10)))
    scale = _Scale(1.0, max(10.0, top))
    body, y, scenario = [], float(_TOP_PX), ""
    for row, group in shown:
        if row.scenario != scenario:
            scenario = row.scenario
            y += _HEADING_PX
            body.append(f'<text class="tick" x="10" y="{y - 5:.1f}">{escape(scenario)}</text>')
        body += _bar(row, group, scale, y)
        y += _LINE_PX
    width, height = _LABELS_PX + _BARS_PX + _FIGURES_PX, y + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height:.0f}" '
        f'viewBox="0 0 {width} {height:.0f}" role="img">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style>",
        f'<rect width="{width}" height="{height:.0f}" fill="#fff"/>',
        f'<text class="title" x="10" y="24">{escape(title)}</text>',
        *_grid(scale, y),
        *body,
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


class _Scale:
    def __init__(self, low: float, high: float) -> None:
        self._low, self._span = math.log10(low), math.log10(high) - math.log10(low)
        self.decades = [10.0**power for power in range(int(self._low), round(math.log10(high)) + 1)]

    def x(self, value: float) -> float:
        share = (math.log10(max(value, 10**self._low)) - self._low) / self._span
        return _LABELS_PX + share * _BARS_PX


def _grid(scale: _Scale, bottom: float) -> list[str]:
    parts = []
    for decade in scale.decades:
        x = scale.x(decade)
        parts.append(
            f'<line class="grid" x1="{x:.1f}" y1="{_TOP_PX - 6}" x2="{x:.1f}" y2="{bottom:.1f}"/>'
            f'<text class="tick" x="{x:.1f}" y="{bottom + 16:.1f}" text-anchor="middle">'
            f"{_compact(decade)}/s</text>"
        )
    return parts


def _bar(row: Row, group: Sequence[Row], scale: _Scale, y: float) -> list[str]:
    start, end, middle = scale.x(0), scale.x(row.rate_s), y + _LINE_PX / 2
    low, high = (scale.x(pick(each.rate_s for each in group)) for pick in (min, max))
    return [
        f'<text x="{_LABELS_PX - 8}" y="{middle + 4:.1f}" text-anchor="end">'
        f"{escape(row.case)}</text>"
        f'<rect class="bar" x="{start:.1f}" y="{y + 2:.1f}" width="{end - start:.1f}" '
        f'height="{_LINE_PX - 5}"/>'
        f'<line class="range" x1="{low:.1f}" y1="{middle:.1f}" x2="{high:.1f}" y2="{middle:.1f}"/>'
        f'<text x="{high + 6:.1f}" y="{middle + 4:.1f}">{row.rate_s:,.0f}</text>'
    ]


def _compact(number: float) -> str:
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:g}{letter}"
    return f"{number:g}"
