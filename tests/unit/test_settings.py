"""Settings: environment over file over defaults, and no name misspelt in silence."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from npufleet import settings
from npufleet.errors import ConfigurationError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "npufleet.toml"
    path.write_text('port = 1111\nhost = "file"\nmodels = "m"\n', encoding="utf-8")
    return path


def test_the_command_line_wins_over_environment_over_file_over_defaults(file: Path) -> None:
    """And what the command line leaves open (None) wins over nothing."""
    found = settings.load(
        {"port": 3333, "workers": None},
        environ={"NPUFLEET_PORT": "2222", "NPUFLEET_HOST": "env", "NPUFLEET_WORKERS": "7"},
        file=file,
    )

    assert (found.port, found.host, found.workers) == (3333, "env", 7)
    assert found.models == Path("m")
    assert found.prefix == "npufleet"


def test_the_file_in_the_working_folder_is_found(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`npufleet.toml`, which need not be there; one that was named must be."""
    monkeypatch.chdir(file.parent)
    assert settings.load(environ={}).port == 1111

    file.unlink()
    assert settings.load(environ={}).port == 8080
    with pytest.raises(ConfigurationError, match="does not exist"):
        settings.load(environ={}, file=file)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("NPUFLEET_PROT", "did you mean NPUFLEET_PORT?"),
        ("NPUFLEET_REDIS", "did you mean NPUFLEET_REDIS_URL?"),
        ("NPUFLEET_WORKER_PORT", "did you mean NPUFLEET_WORKER_HTTP_PORT?"),
        ("NPUFLEET_ZZZZZZZZZ", "is not a setting"),
    ],
)
def test_a_misspelt_variable_is_refused_with_the_nearest_name(name: str, hint: str) -> None:
    """A setting that does nothing is worse than a process that does not start."""
    with pytest.raises(ConfigurationError, match=name) as caught:
        settings.load(environ={name: "1"})
    assert hint in caught.value.message


def test_a_misspelt_key_of_the_file_is_refused_with_the_nearest_name(file: Path) -> None:
    """The same for the file, which is named."""
    file.write_text("prot = 1\n", encoding="utf-8")

    with pytest.raises(ConfigurationError, match=r"npufleet\.toml: prot .* did you mean port\?"):
        settings.load(environ={}, file=file)


@pytest.mark.parametrize("content", [b"port = ", b"\xff\xfe", b"[port]\nx = 1\n"])
def test_a_broken_file_is_named(file: Path, content: bytes) -> None:
    """TOML errors, other encodings and tables where a value belongs."""
    file.write_bytes(content)

    with pytest.raises(ConfigurationError, match=r"npufleet\.toml|port"):
        settings.load(environ={}, file=file)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NPUFLEET_PORT", "65536"),
        ("NPUFLEET_PORT", "http"),
        ("NPUFLEET_LEASE_S", "0"),
        ("NPUFLEET_PREFIX", "a:b"),
        ("NPUFLEET_PREFIX", "{a}"),
        ("NPUFLEET_LOG_LEVEL", "loud"),
        ("NPUFLEET_WORKER_NAME", "a b"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(name: str, value: str) -> None:
    """The message names the setting and shows what was got."""
    with pytest.raises(ConfigurationError, match=name.removeprefix("NPUFLEET_").lower()) as caught:
        settings.load(environ={name: value})
    assert repr(value) in caught.value.message


def test_what_kubernetes_injects_is_no_setting() -> None:
    """Services called npufleet, npufleet-redis and npufleet-gateway in the same namespace."""
    injected = {
        "NPUFLEET_SERVICE_HOST": "10.0.0.1",
        "NPUFLEET_SERVICE_PORT": "8080",
        "NPUFLEET_SERVICE_PORT_HTTP": "8080",
        "NPUFLEET_PORT": "tcp://10.0.0.1:8080",
        "NPUFLEET_PORT_8080_TCP": "tcp://10.0.0.1:8080",
        "NPUFLEET_PORT_8080_TCP_ADDR": "10.0.0.1",
        "NPUFLEET_PORT_8080_TCP_PORT": "8080",
        "NPUFLEET_PORT_8080_TCP_PROTO": "tcp",
        "NPUFLEET_REDIS_SERVICE_HOST": "10.0.0.2",
        "NPUFLEET_REDIS_PORT": "tcp://10.0.0.2:6379",
        "NPUFLEET_REDIS_PORT_6379_TCP": "tcp://10.0.0.2:6379",
        "NPUFLEET_GATEWAY_PORT": "tcp://10.0.0.3:8080",
        "OTHER_PORT": "1",
    }

    found = settings.load(environ=injected)

    assert (found.port, found.redis_port) == (8080, None)


def test_our_own_switches_are_no_settings() -> None:
    """The tests and the launcher have words of their own."""
    settings.load(environ={"NPUFLEET_DEBUG": "1", "NPUFLEET_TEST_REDIS_BINARY": "x"})


def test_settings_are_built_once_and_never_change() -> None:
    """They are passed down, so nobody may change them for the others."""
    found = settings.load(environ={})

    with pytest.raises(ValidationError, match="frozen"):
        found.port = 1


def test_every_setting_says_what_it_is() -> None:
    """`--help` and the documentation are made of these words."""
    bare = [n for n, f in settings.Settings.model_fields.items() if not f.description]

    assert set(bare) <= {"log_level", "log_format"}
