"""What simulated devices did within a window, told from their log. Pure but for reading the file.

Knows nothing of loads.
"""

import math
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """Of all devices of one log: mean share of time busy, median gap between runs, mean batch."""

    devices: int
    busy_share: float
    gap_ms: float
    mean_batch: float


def read(log: Path, start_s: float, end_s: float) -> DeviceUse:
    """The use of the devices from `start_s` to `end_s`, monotonic seconds."""
    return use(log.read_text(encoding="ascii"), start_s, end_s)


def use(text: str, start_s: float, end_s: float) -> DeviceUse:
    """The same, of the lines themselves; NaN where nothing ran. A line cut short is left out."""
    runs: dict[str, list[tuple[float, float]]] = defaultdict(list)
    rows: list[int] = []
    for line in text.splitlines():
        words = line.split()
        if len(words) != 5:
            continue
        begun_s, over_s = float(words[1]), float(words[2])
        if over_s > start_s and begun_s < end_s:
            runs[words[0]].append((begun_s, over_s))
            rows.append(int(words[3]))
    if not runs:
        return DeviceUse(0, 0.0, math.nan, math.nan)
    busy_s = [
        sum(min(over, end_s) - max(begun, start_s) for begun, over in device)
        for device in runs.values()
    ]
    gaps_ms = [
        (after[0] - before[1]) * 1000
        for device in runs.values()
        for before, after in pairwise(sorted(device))
    ]
    gap_ms = median(gaps_ms) if gaps_ms else math.nan
    return DeviceUse(len(runs), fmean(busy_s) / (end_s - start_s), gap_ms, fmean(rows))
