"""What a load generator is told and what it reports; both cross to its process as JSON.

A generator is a process of its own, so that its CPU can be told apart:

    python -m bench.http_load | bench.direct_load  LOAD      (JSON)

It prints `begin` when its measuring window opens, `end` when it closes, and then its Report. Knows
nothing of how requests are sent.
"""

import json
import math
import time
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field

import numpy as np

_CORRECTED_S = 0.002


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One stream of requests for `seconds` after a warm-up.

    A closed loop keeps `clients` requests under way; with `rate_s` it is an open one, with Poisson
    arrivals at that many requests a second, whatever comes of them. `target` is a URL, of HTTP or
    of the queue; `vectors` the file of inputs and outputs; `wire` as in bench.wires.
    """

    target: str
    vectors: str
    model: str = ""
    wire: str = "raw"
    clients: int = 1
    rate_s: float | None = None
    lane: str = "normal"
    seconds: float = 4.0
    warm_up_s: float = 1.0
    timeout_s: float = 30.0
    seed: int = 1

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Load":
        return cls(**json.loads(text))

    def arrivals_s(self) -> Iterator[float]:
        """The times of an open loop's requests, from 0, for as long as the load lasts."""
        assert self.rate_s is not None
        random = np.random.default_rng(self.seed)
        at_s = 0.0
        while True:
            at_s += float(random.exponential(1 / self.rate_s))
            if at_s >= self.warm_up_s + self.seconds:
                return
            yield at_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What came of a load within its window, `start_s` to `end_s` (monotonic seconds).

    Latencies and rate are those of right answers that came within the window; wrong answers and
    failures are counted in `errors` by kind, over the whole load. `unfinished` never had an answer:
    lost, or given up when the load was over. Latencies are NaN where there is no answer.
    """

    start_s: float
    end_s: float
    answered: int
    rate_s: float
    p50_ms: float
    p95_ms: float
    p99_ms: float
    max_ms: float
    mean_batch: float = math.nan
    unfinished: int = 0
    errors: Mapping[str, int] = field(default_factory=dict)
    first_error: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Report":
        return cls(**json.loads(text))


class Tally:
    """Counts answers and failures as they come."""

    def __init__(self) -> None:
        self._latency_s, self._done_s, self._batch = array("d"), array("d"), array("d")
        self._errors: Counter[str] = Counter()
        self._first_error = ""

    def answered(self, begun_s: float, now_s: float, batch: float = math.nan) -> None:
        """A right answer; `batch` is the number of rows that it ran with."""
        self._latency_s.append(now_s - begun_s)
        self._done_s.append(now_s)
        self._batch.append(batch)

    def failed(self, kind: str, detail: str = "") -> None:
        self._errors[kind] += 1
        self._first_error = self._first_error or f"{kind}: {detail[:300]}"

    def report(self, start_s: float, end_s: float, *, unfinished: int) -> Report:
        done_s = np.array(self._done_s)
        within = (done_s >= start_s) & (done_s < end_s)
        latency_ms = np.array(self._latency_s)[within] * 1000
        batch = np.array(self._batch)[within]
        quantiles = (
            np.quantile(latency_ms, (0.5, 0.95, 0.99, 1)) if within.any() else [math.nan] * 4
        )
        p50_ms, p95_ms, p99_ms, max_ms = (round(float(value), 3) for value in quantiles)
        return Report(
            start_s=start_s,
            end_s=end_s,
            answered=int(within.sum()),
            rate_s=round(float(within.sum()) / (end_s - start_s), 1),
            p50_ms=p50_ms,
            p95_ms=p95_ms,
            p99_ms=p99_ms,
            max_ms=max_ms,
            mean_batch=round(float(batch.mean()), 2) if within.any() else math.nan,
            unfinished=unfinished,
            errors=dict(self._errors),
            first_error=self._first_error,
        )


class Window:
    """The measuring window of a load that begins now; tells its parent when it opens and closes."""

    def __init__(self, load: Load) -> None:
        self.begun_s = time.monotonic()
        self._opens_s = self.begun_s + load.warm_up_s
        self._closes_s = self._opens_s + load.seconds
        self.start_s: float | None = None
        self.end_s: float | None = None

    def closed(self, now_s: float) -> bool:
        """Whether the load is over; to be asked often, since it moves the window along."""
        if self.start_s is None and now_s >= self._opens_s:
            self.start_s = now_s
            print("begin", flush=True)
        if self.end_s is None and now_s >= self._closes_s:
            self.end_s = now_s
            print("end", flush=True)
        return self.end_s is not None

    def left_s(self, now_s: float) -> float:
        """How long it takes until it is certainly over."""
        return max(0.0, self._closes_s - now_s) + _CORRECTED_S


def counted_from_s(arrival_s: float, now_s: float) -> float:
    """When an open loop's request begins to count: at its arrival where it went out late.

    A generator's own timers are a millisecond late at most, which is not the server's doing.
    """
    return arrival_s if now_s - arrival_s > _CORRECTED_S else now_s
