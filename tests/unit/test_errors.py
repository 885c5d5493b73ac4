"""The error tree: what programs may rely on."""

import re

import pytest

from npufleet import errors


def test_every_code_names_one_class() -> None:
    """A code on the wire comes back as exactly the class that sent it."""
    for code, cls in errors.BY_CODE.items():
        error = errors.from_wire(code, "a sentence")

        assert type(error) is cls
        assert (error.code, error.message, str(error)) == (code, "a sentence", "a sentence")
    classes = {c for c in vars(errors).values() if isinstance(c, type)}
    ours = {c for c in classes if issubclass(c, errors.NpufleetError)} - {errors.RemoteError}
    assert len(errors.BY_CODE) == len(ours), "two classes share a code"


def test_the_table_in_the_docstring_is_the_tree() -> None:
    """Class, code and status of every error stand in the module's table, and nothing else does."""
    rows = re.findall(r"([A-Z]\w+) +([a-z0-9_]+) +(\d{3})", errors.__doc__ or "")

    assert {(name, code, int(status)) for name, code, status in rows} == {
        (cls.__name__, code, cls.status) for code, cls in errors.BY_CODE.items()
    }


def test_a_callers_fault_is_a_4xx_and_never_worth_a_retry() -> None:
    """Sending a bad request again cannot help, and its status says whose fault it is."""
    for cls in errors.BY_CODE.values():
        if issubclass(cls, errors.RequestError):
            assert 400 <= cls.status < 500
            assert not cls.retryable


@pytest.mark.parametrize("retryable", [True, False])
def test_a_code_of_a_later_release_is_carried_as_it_is(retryable: bool) -> None:
    """An unknown code keeps its own word and its own advice on retrying."""
    error = errors.from_wire("from_the_future", "later", retryable=retryable)

    assert isinstance(error, errors.RemoteError)
    assert (error.code, error.retryable) == ("from_the_future", retryable)
    assert errors.NpufleetError.code == "internal", "the class must not change"
