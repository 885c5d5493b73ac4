"""Fixtures that every test may use, and the rule about skipped tests."""

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.valkey import connect, running_server

ROOT = Path(__file__).parents[1]
MAY_SKIP = ("containers", "torch")
skipped_in_ci: list[str] = []


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """URL of a real server, shared by the tests of one pytest process: keep to `prefix`."""
    with running_server() as url:
        yield url


@pytest.fixture
def redis_client(redis_url: str) -> Iterator[object]:
    """A plain redis-py client of that server, answering bytes."""
    with connect(redis_url) as client:
        yield client


@pytest.fixture
def prefix() -> str:
    """A key prefix that no other test has."""
    return f"t{uuid.uuid4().hex[:12]}"


@pytest.fixture(scope="session")
def models() -> Path:
    """The sample model repository."""
    return ROOT / "models"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> Iterator[None]:
    yield
    _note_skip(report)


@pytest.hookimpl(wrapper=True)
def pytest_collectreport(report: pytest.CollectReport) -> Iterator[None]:
    yield
    _note_skip(report)


def _note_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    # An expected failure is reported as skipped, too.
    if not report.skipped or hasattr(report, "wasxfail"):
        return
    marks = getattr(report, "keywords", ())
    if not any(word in marks or word in report.nodeid for word in MAY_SKIP):
        skipped_in_ci.append(report.nodeid)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Under CI=true nothing is skipped in silence: a missing program is a failure there."""
    is_controller = not hasattr(session.config, "workerinput")
    if os.environ.get("CI") == "true" and skipped_in_ci and is_controller and exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if os.environ.get("CI") == "true" and skipped_in_ci:
        terminalreporter.section("skipped, which fails the run under CI=true")
        for nodeid in skipped_in_ci:
            terminalreporter.line(nodeid)
