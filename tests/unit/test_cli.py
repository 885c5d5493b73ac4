"""The command line itself: finding commands and telling errors."""

import sys

import pytest

from npufleet import __version__
from npufleet.cli import main
from npufleet.errors import ConfigurationError


def test_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """`npufleet --version` says the version and succeeds."""
    with pytest.raises(SystemExit) as end:
        main(["--version"])

    assert end.value.code == 0
    assert capsys.readouterr().out == f"npufleet {__version__}\n"


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    """Commands of all layers are listed, whether or not their extra is installed."""
    with pytest.raises(SystemExit) as end:
        main(["--help"])

    assert end.value.code == 0
    words = capsys.readouterr().out.split()
    assert {"up", "demo", "submit", "gateway", "worker", "tune", "selfcheck"} <= set(words)


def test_an_error_of_ours_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """No traceback for what a person can correct; NPUFLEET_DEBUG=1 shows it."""
    monkeypatch.delenv("NPUFLEET_DEBUG", raising=False)

    with pytest.raises(SystemExit) as end:
        main(["up", "--models", "/nowhere"])
    assert str(end.value.code).startswith("error: no model in /nowhere: --models names a folder")

    monkeypatch.setenv("NPUFLEET_DEBUG", "1")
    with pytest.raises(ConfigurationError):
        main(["up", "--models", "/nowhere"])


def test_wrong_usage_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    """Scripts can tell a wrong call from one that failed."""
    with pytest.raises(SystemExit) as end:
        main(["up", "--nonsense"])

    assert end.value.code == 2
    assert "--nonsense" in capsys.readouterr().err


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command whose libraries are missing says what to install, without a traceback."""
    for name in [name for name in sys.modules if name.startswith("npufleet_gateway")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "aiohttp", None)

    with pytest.raises(SystemExit) as end:
        main(["gateway"])

    assert "pip install 'npufleet[gateway]'" in str(end.value.code)
