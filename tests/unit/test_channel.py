"""Control messages: what goes in comes out, and the ends of both processes are seen."""

import pytest

from npufleet.signature import TensorSpec
from npufleet_worker.channel import (
    MAX_MESSAGE_BYTES,
    Channel,
    Closed,
    Done,
    Failed,
    Load,
    Message,
    Output,
    Ready,
    Refused,
    Run,
)

SPEC = TensorSpec("x", "FP32", (-1, 4))
MESSAGES: list[Message] = [
    Load("/models/m/1/model.onnx", None, 2, (1, 8)),
    Ready((SPEC,), (SPEC, SPEC), (1, 4), ((1, 0.5), (4, 1.5))),
    Refused("no device"),
    Run(7, 3, 4, ((4,), ()), ((1, 0, 64), (2, 1 << 40, 192))),
    Done(7, (Output("y", "FP32", (3, 4), 0), Output("z", "INT8", (3,), 64)), 128, 1.25),
    Failed(7, "model_failed", "nicht so: \u00fc"),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_a_message_arrives_as_it_was_sent(message: Message) -> None:
    """Records inside included."""
    ours, theirs = Channel.pair()
    with theirs:
        Channel(theirs).send(message)
        assert ours.receive(wait=False) == message
    ours.close()


def test_nothing_to_read_is_none_and_not_a_wait() -> None:
    """The event loop asks until there is nothing left."""
    ours, theirs = Channel.pair()
    with theirs:
        assert ours.receive(wait=False) is None
        assert Channel(theirs).receive(wait=False) is None
    ours.close()


def test_messages_sent_before_the_end_still_arrive() -> None:
    """A process that dies after its answer has answered."""
    ours, theirs = Channel.pair()
    with theirs:
        Channel(theirs).send(Refused("bye"))
    assert ours.receive(wait=False) == Refused("bye")
    with pytest.raises(Closed):
        ours.receive(wait=False)
    with pytest.raises(Closed):
        ours.send(Refused("anybody there"))
    ours.close()


def test_one_side_may_finish_and_still_listen() -> None:
    """How a supervisor ends an executor that has something under way."""
    ours, theirs = Channel.pair()
    with theirs:
        ours.finish()
        other = Channel(theirs)
        with pytest.raises(Closed):
            other.receive(wait=True)
        other.send(Refused("last words"))
        assert ours.receive(wait=False) == Refused("last words")
    ours.close()


def test_two_of_the_largest_batches_fit_on_their_way() -> None:
    """4096 requests of one row and three inputs each, never a wait in the event loop."""
    ours, theirs = Channel.pair()
    offsets = tuple(range(1 << 30, (1 << 30) + 3))
    run = Run(1, 0, 4096, ((4,),) * 3, ((1, *offsets),) * 4096)
    with theirs:
        ours.send(run)
        ours.send(run)
        other = Channel(theirs)
        assert [other.receive(wait=True), other.receive(wait=True)] == [run, run]
    ours.close()


def test_a_message_too_large_is_refused_by_its_sender() -> None:
    """With what is wrong."""
    ours, theirs = Channel.pair()
    with theirs, pytest.raises(ValueError, match="too many requests"):
        ours.send(Run(1, 0, 1, (), ((1, 1 << 40),) * (MAX_MESSAGE_BYTES // 8)))
    ours.close()
