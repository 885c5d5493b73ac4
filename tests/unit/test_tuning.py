"""Tuning and self-check without a device: simulation, choice, differences, the file, the chart."""

import math
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from npufleet.errors import ConfigurationError
from npufleet.tensors import Array
from npufleet_worker.batching import BatchPolicy
from npufleet_worker.lab import batching_section, chart
from npufleet_worker.lab.experiment import widened
from npufleet_worker.lab.numerics import Difference, Tolerance, difference
from npufleet_worker.lab.profile import GearTime, Profile, Windows
from npufleet_worker.lab.simulation import Device, Load, Point, simulate
from npufleet_worker.lab.trial import powers
from npufleet_worker.lab.tuning import Goal, Verdict, candidates, curve, preferred, sweep
from npufleet_worker.repository import Batching, load_model

SIZES = (1, 2, 4, 8, 16, 32)


def profile(fixed_ms: float, row_ms: float, sizes: Sequence[int] = SIZES) -> Profile:
    """A device without any noise: fixed_ms + row_ms * n."""
    return Profile([GearTime(n, (fixed_ms + row_ms * n,), 0.0) for n in sizes])


def one_by_one(load: Load, run_ms: float) -> Array:
    """The latencies of a queue without batches, by Lindley's recursion on the same arrivals."""
    gaps = np.random.default_rng(load.seed).exponential(1 / load.rate, load.requests)
    end_s, latencies = 0.0, []
    for arrival_s in np.cumsum(gaps):
        end_s = max(arrival_s, end_s) + run_ms / 1000
        latencies.append((end_s - arrival_s) * 1000)
    return np.array(latencies[load.requests // 10 :])


@pytest.mark.parametrize("rate", [20.0, 120.0, 180.0])
def test_a_simulation_without_batches_is_the_textbooks_queue(rate: float) -> None:
    """Batches of one row, fixed times: latencies as computed in another way."""
    load = Load(rate, 3000)
    wanted = one_by_one(load, 5.0)
    policy = BatchPolicy(1, 0.0)
    got = simulate(policy, Device(profile(5.0, 0.0, [1])), load, give_up_ms=1e6)
    assert got.p50_ms == pytest.approx(np.percentile(wanted, 50))
    assert got.p99_ms == pytest.approx(np.percentile(wanted, 99))
    assert (got.mean_batch, got.sustained) == (1.0, True)


def test_a_lone_row_waits_out_its_window_only_where_the_policy_says_so() -> None:
    """At one request in ten seconds nobody else will come: adaptive goes at once."""
    device, load = Device(profile(5.0, 0.0)), Load(0.1, 300)
    windowed = simulate(BatchPolicy(8, 20.0, adaptive=False), device, load, give_up_ms=1e6)
    adaptive = simulate(BatchPolicy(8, 20.0), device, load, give_up_ms=1e6)
    assert windowed.p50_ms == pytest.approx(25.0)
    assert adaptive.p50_ms == pytest.approx(5.0)


def test_batches_are_padded_to_the_gears_of_the_device() -> None:
    """Alone, a row takes the time of the smallest gear that there is."""
    device = Device(profile(1.0, 2.0, [4, 8]), gears=(4, 8))
    alone = simulate(BatchPolicy(8, 0.0), device, Load(1.0, 300), give_up_ms=1e6)
    assert alone.p50_ms == pytest.approx(9.0)


def test_a_simulation_is_the_same_every_time_and_gives_up_on_a_queue_that_grows() -> None:
    """Seeded; and an overload ends it early."""
    noisy = Device(Profile([GearTime(1, (4.0, 5.0, 9.0), 0.0), GearTime(8, (8.0, 12.0), 0.0)]))
    policy, load = BatchPolicy(8, 2.0), Load(300.0, 1000, seed=7)
    one, other = (simulate(policy, noisy, load, give_up_ms=1e6) for _ in range(2))
    assert one == other
    drowned = simulate(policy, noisy, Load(3000.0, 5000), give_up_ms=100.0)
    assert not drowned.sustained


def test_the_largest_rate_within_the_bound_is_chosen() -> None:
    """The chosen rate meets the bound, the next one does not, and no other setting beats it."""
    device, goal = Device(profile(5.0, 0.2)), Goal(16.0, requests=500)
    choice = sweep(device, candidates(SIZES, goal, adaptive=True), goal)

    assert choice.chosen is not None
    assert choice.chosen.best is not None
    best = choice.chosen.best
    assert best.p99_ms <= 16.0
    assert all(not goal.met(p) for p in choice.chosen.points if p.rate > best.rate)
    assert all(v.best is None or v.best.rate <= best.rate for v in choice.verdicts)
    alone = device.profile.capacity(1)
    assert best.rate > 3 * alone, "without batches the device could not do it"
    drawn = list(curve(device, choice.chosen.policy, goal))
    assert best in drawn
    assert [p.rate for p in drawn] == sorted(p.rate for p in drawn)


def test_rates_end_where_the_host_does() -> None:
    """A device that is quicker than the process that feeds it is not promised in full."""
    device = Device(profile(0.1, 0.01), host_rows_per_s=5000.0)
    goal = Goal(50.0, requests=500)
    choice = sweep(device, candidates([32], goal, adaptive=True), goal)
    assert choice.chosen is not None
    assert choice.chosen.best is not None
    assert choice.chosen.best.rate == pytest.approx(0.95 * 5000)
    assert device.profile.best_rows_per_s > 50_000


def test_a_longer_wait_never_pays_beyond_the_bound() -> None:
    """Waits that leave no room for the run are not even tried."""
    assert {p.max_wait_ms for p in candidates([4], Goal(10.0), adaptive=True)} == {0, 1, 2, 5}


def test_a_bound_below_a_single_run_is_met_by_nothing() -> None:
    """And the nearest setting is told, with what it reaches."""
    device, goal = Device(profile(20.0, 1.0)), Goal(15.0, requests=300)
    choice = sweep(device, candidates(SIZES, goal, adaptive=True), goal)
    assert choice.chosen is None
    assert choice.nearest.points[0].p99_ms >= 21.0


def test_of_equal_settings_the_one_with_room_to_spare_is_taken() -> None:
    """Then the shorter wait; but a clearly quicker one comes before."""

    def verdict(size: int, wait: float, *, rate: float = 100, p99: float = 10) -> Verdict:
        best = Point(rate, p99 / 2, p99, 1.0, sustained=True)
        return Verdict(BatchPolicy(size, wait), (best,), best, float(size))

    slow, small = verdict(64, 0.0, p99=20), verdict(8, 0.0)
    large, waiting = verdict(16, 1.0), verdict(16, 2.0, p99=9.9)
    assert preferred([slow, small, waiting, large]) is large
    assert preferred([small, faster := verdict(2, 5.0, rate=101, p99=30)]) is faster
    assert preferred([]) is None


def test_a_window_counts_when_three_in_a_row_agree() -> None:
    """Not three of four, and not two."""
    windows = Windows(agreement=0.1)
    settled = [windows.add([ms, ms]) for ms in (10.0, 10.1, 12.0, 10.0, 10.2, 10.9)]
    assert settled == [False, False, False, False, False, True]
    time = windows.time(4, settled=True)
    assert sorted(time.samples_ms) == [10.0, 10.0, 10.2, 10.2, 10.9, 10.9]
    assert time.rows_per_s == pytest.approx(4 / time.mean_ms * 1000)
    assert time.spread == pytest.approx(0.09)


def test_very_many_samples_are_kept_as_their_quantiles() -> None:
    """The mean and the tail stay, the memory does not grow."""
    windows = Windows(agreement=1.0)
    for _ in range(3):
        windows.add([1.0] * 9_800 + [50.0] * 200)
    time = windows.time(1, settled=True)
    assert len(time.samples_ms) == 200
    assert time.mean_ms == pytest.approx(1.98)
    assert np.percentile(time.samples_ms, 99) == 50.0


def test_the_fit_finds_what_a_batch_and_what_a_row_takes() -> None:
    """Times that fall with the size are noise: the line stays level."""
    fit = profile(3.0, 0.5).fit()
    assert fit is not None
    assert (fit.fixed_ms, fit.row_ms) == pytest.approx((3.0, 0.5))
    level = Profile([GearTime(1, (1.1,), 0.0), GearTime(2, (1.0,), 0.0)]).fit()
    assert level is not None
    assert level.row_ms == 0
    assert 1.0 < level.fixed_ms < 1.1
    assert profile(3.0, 0.5, [4]).fit() is None


def test_between_two_measured_sizes_the_time_is_between_theirs() -> None:
    """On the line, and never beyond the ends."""
    measured = Profile([GearTime(2, (10.0,), 0.0), GearTime(4, (20.0,), 0.0)])
    assert [measured.mean_ms(n) for n in (1, 2, 3, 4, 9)] == [10, 10, 15, 20, 20]
    assert measured.capacity(3) == pytest.approx(200.0)
    assert measured.best_rows_per_s == pytest.approx(200.0)


@pytest.mark.parametrize(
    ("batching", "most", "wanted"),
    [
        (Batching(), None, 32),
        (Batching(max_batch_size=8), None, 32),
        (Batching(max_batch_size=64), None, 64),
        (Batching(max_batch_size=64), 16, 16),
        (Batching(gears=(1, 6, 48), max_batch_size=6), None, 48),
        (Batching(gears=(1, 6, 48), max_batch_size=48), 40, 6),
    ],
)
def test_what_is_tried_goes_beyond_todays_limit(
    batching: Batching, most: int | None, wanted: int
) -> None:
    """Up to the largest gear, or to 32 rows, or to what the caller says."""
    assert widened(batching, most).max_batch_size == wanted


def test_a_limit_below_every_batch_is_refused() -> None:
    """Nothing could be measured."""
    with pytest.raises(ConfigurationError, match="no batch of at most 2 rows"):
        widened(Batching(gears=(4, 8), max_batch_size=8), 2)
    with pytest.raises(ConfigurationError, match="min_batch_size 4"):
        widened(Batching(min_batch_size=4), 2)


def test_without_gears_the_powers_of_two_and_both_ends_are_tried() -> None:
    """The limit itself is always one of them."""
    assert powers(1, 8) == (1, 2, 4, 8)
    assert powers(3, 12) == (3, 4, 8, 12)
    assert powers(5, 5) == (5,)


@pytest.mark.parametrize(
    ("got", "wanted", "expected"),
    [
        ([1.0, 2.0], [1.0, 2.0], Difference()),
        ([1.0, 2.5], [1.0, 2.0], Difference(0.5, 0.25, 1)),
        ([1.0, 2.00001], [1.0, 2.0], Difference(1e-5, 5e-6, 0)),
        ([math.nan, math.inf], [math.nan, math.inf], Difference()),
        ([math.nan, 1.0], [1.0, 1.0], Difference(math.inf, math.inf, 1)),
        ([1.0, 1.0], [math.nan, 1.0], Difference(math.inf, 0.0, 1)),
        ([math.inf, 1.0], [-math.inf, 1.0], Difference(math.inf, 0.0, 1)),
        ([1e-9, 1.0], [2e-9, 1.0], Difference(1e-9, 0.0, 0)),
    ],
)
def test_differences_are_the_largest_ones(
    got: list[float], wanted: list[float], expected: Difference
) -> None:
    """NaN and infinity included; of numbers next to nothing only the absolute one counts."""
    found = difference(np.array(got), np.array(wanted), Tolerance())
    assert found.absolute == pytest.approx(expected.absolute)
    assert found.relative == pytest.approx(expected.relative)
    assert found.outside == expected.outside


def test_differences_of_whole_numbers_and_of_shapes() -> None:
    """Unsigned numbers do not wrap around; another shape is another answer."""
    a, b = np.array([1, 200], np.uint8), np.array([3, 200], np.uint8)
    assert difference(a, b, Tolerance()) == Difference(2.0, 2 / 3, 1)
    assert difference(a, b[:1], Tolerance()).outside == 2


def test_differences_add_up() -> None:
    """Largest of all, sum of what is outside."""
    assert Difference(1.0, 0.1, 2) | Difference(0.5, 0.4, 3) == Difference(1.0, 0.4, 5)


COMMENTED = """\
# Which model this is.

[limits]
timeout_ms = 100     # patience

[batching]           # by hand
policy = "window"    # stays
max_batch_size = 4   # on this device
gears = [1, 4, 8]

[executor]
threads = 2
"""


def model(folder: Path, toml: str | None) -> Path:
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.onnx").touch()
    if toml is not None:
        (folder / "model.toml").write_text(toml)
    return folder / "model.toml"


def test_only_the_two_keys_of_the_file_change(tmp_path: Path) -> None:
    """Comments, order and other sections are as they were."""
    file = model(tmp_path / "m", COMMENTED)
    file.chmod(0o640)
    batching_section.write(file, max_batch_size=8, max_wait_ms=2.5)

    wanted = COMMENTED.replace("max_batch_size = 4 ", "max_batch_size = 8 ")
    written = file.read_text()
    assert [line for line in written.splitlines() if "max_wait_ms" not in line] == (
        wanted.splitlines()
    )
    config = load_model(file.parent)
    assert (config.batching.max_batch_size, config.batching.max_wait_ms) == (8, 2.5)
    assert (config.batching.policy, config.batching.gears) == ("window", (1, 4, 8))
    assert (config.executor.threads, config.limits.timeout_ms) == (2, 100)
    assert file.stat().st_mode & 0o777 == 0o640
    assert list(file.parent.glob(".model.toml-*")) == []


@pytest.mark.parametrize(
    "toml",
    [
        None,
        "",
        "# nothing yet\n",
        "[executor]\nthreads = 2\n",
        "batching = { max_batch_size = 2, policy = 'window' }\n",
        "[batching]\nmax_wait_ms = 1\n\n[executor]\nthreads = 2",
    ],
)
def test_a_file_of_any_shape_loads_again(tmp_path: Path, toml: str | None) -> None:
    """Even none at all."""
    file = model(tmp_path / "m", toml)
    before = load_model(file.parent)
    batching_section.write(file, max_batch_size=16, max_wait_ms=5.0)
    after = load_model(file.parent)
    assert (after.batching.max_batch_size, after.batching.max_wait_ms) == (16, 5)
    assert after.batching.policy == before.batching.policy
    assert after.executor == before.executor


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """With the reason, and without a trace left behind."""
    with pytest.raises(ConfigurationError, match=r"model\.toml cannot be changed"):
        batching_section.write(tmp_path / "gone" / "model.toml", max_batch_size=1, max_wait_ms=0.0)


def test_the_chart_is_an_svg_file_with_every_line() -> None:
    """Names are escaped, points beyond the axes are left out, single points are circles."""
    text = chart.draw(
        [
            chart.Series("a < b & c", ((1.0, 2.0), (50.0, 9.0), (60.0, 999.0)), bold=True),
            chart.Series("proof", ((40.0, 5.0),), marks=True),
        ],
        title="m/1",
        x=chart.Axis("rows per second", 100.0),
        y=chart.Axis("ms", 10.0),
        limit=("bound 5 ms", 5.0),
    )
    root = ElementTree.fromstring(text)
    words = ["".join(part.itertext()) for part in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"a < b & c", "proof", "bound 5 ms", "rows per second", "m/1"} <= set(words)
    circles = list(root.iter("{http://www.w3.org/2000/svg}circle"))
    assert len(circles) == 3
    assert "nan" not in text
    assert "inf" not in text


@pytest.mark.parametrize(
    ("most", "wanted"),
    [(10.0, [0, 2, 4, 6, 8, 10]), (0.6, [0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6]), (2670.0, None)],
)
def test_ticks_are_round_numbers(most: float, wanted: list[float] | None) -> None:
    """A handful of them, none beyond the axis."""
    ticks = chart.ticks(most)
    assert ticks[-1] <= most * (1 + 1e-9)
    assert 4 <= len(ticks) <= 8
    if wanted is not None:
        assert ticks == pytest.approx(wanted)
