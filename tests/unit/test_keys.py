"""Names of keys: the wire's table, and what may stand in a name."""

import pytest

from npufleet.errors import InvalidId, ModelNotFound
from npufleet.keys import FleetKeys, ModelKeys, check_id, check_model, is_notify


def test_the_keys_of_a_model_are_those_of_the_protocol() -> None:
    """Producers in other languages spell these names by hand: they never change."""
    keys = ModelKeys("npufleet", "resnet-50")

    assert keys.lanes == (
        "npufleet:{resnet-50}:high",
        "npufleet:{resnet-50}:normal",
        "npufleet:{resnet-50}:low",
    )
    assert keys.lane("low") == "npufleet:{resnet-50}:low"
    assert keys.reply("a1") == "npufleet:{resnet-50}:reply:a1"
    assert keys.seen("a1") == "npufleet:{resnet-50}:seen:a1"
    assert keys.body("a1") == "npufleet:{resnet-50}:body:a1"
    assert keys.cancelled == "npufleet:{resnet-50}:cancelled"
    assert keys.dead == "npufleet:{resnet-50}:dead"
    assert keys.signature == "npufleet:{resnet-50}:model"
    assert keys.workers == "npufleet:{resnet-50}:workers"
    assert keys.control == "npufleet:{resnet-50}:control"


def test_the_keys_of_the_fleet_are_those_of_the_protocol() -> None:
    """The same for what belongs to no model, under a prefix of one's own."""
    keys = FleetKeys("other")

    assert keys.models == "other:models"
    assert keys.worker("w1") == "other:worker:w1"
    assert keys.notify("g1") == "other:notify:g1"
    assert keys.model("m").base == "other:{m}:"


def test_all_keys_of_a_model_share_one_slot() -> None:
    """On Redis Cluster the hash tag is the model and nothing else, whatever the id holds."""
    keys = ModelKeys("npufleet", "m")

    for key in (*keys.lanes, keys.reply("x:y"), keys.body("x"), keys.dead, keys.workers):
        tag = key[key.index("{") + 1 :]
        assert tag[: tag.index("}")] == "m"


@pytest.mark.parametrize("value", ["a", "A-Z_0.9:x", "x" * 128, "..", "-"])
def test_a_usable_id_is_given_back(value: str) -> None:
    """Letters, digits and `_ . : -`, up to 128 of them."""
    assert check_id(value) == value


@pytest.mark.parametrize(
    "value",
    ["", "x" * 129, "a b", "a\n", "a\0", "é", "a/b", "{a}", "a*", "~", "\u202eabc", "\u0661"],
)
def test_an_unusable_id_is_refused_and_shown_short(value: str) -> None:
    """Nothing that could break a key, a log line or a glob; the message cannot be flooded."""
    with pytest.raises(InvalidId, match="1 to 128 characters") as caught:
        check_id(value)
    assert len(caught.value.message) < 300
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("value", ["", ".a", "-a", "a b", "a{b}", "a:b", "a/b", "x" * 129, "ü"])
def test_no_model_can_have_such_a_name(value: str) -> None:
    """A name with braces or colons could reach another model's keys."""
    with pytest.raises(ModelNotFound):
        check_model(value)
    with pytest.raises(ModelNotFound):
        ModelKeys("npufleet", value)


def test_notify_is_a_plain_name() -> None:
    """An entry can make a worker publish under `notify:` and nowhere else."""
    assert is_notify("gateway-1.a_b")
    assert not any(is_notify(name) for name in ("", "a:b", "a b", "a\n", "x" * 129, "*"))
