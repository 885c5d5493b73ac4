"""Scores to labelled predictions."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from npufleet.tensors import Array
from npufleet_worker.classification import classify

LABELS = ("ant", "bee", "cat", "dog")


def test_the_best_classes_come_first_with_their_labels() -> None:
    """Plain Python numbers, ready for msgpack and JSON, and not rounded."""
    scores = np.array([[0.1, 0.2, 0.3, 0.4], [0.7, 0.1, 0.15, 0.05]], np.float32)
    first, second = classify(scores, LABELS, 2)
    assert [p["label"] for p in first] == ["dog", "cat"]
    assert second[0] == {"label": "ant", "index": 0, "probability": float(np.float32(0.7))}
    assert type(second[0]["index"]) is int
    assert type(second[0]["probability"]) is float


def test_more_classes_than_there_are_gives_all() -> None:
    """And a class beyond the labels is called by its number."""
    (row,) = classify(np.array([[3.0, 1.0, 2.0]]), ("ant",), 10)
    assert [p["label"] for p in row] == ["ant", "2", "1"]
    assert classify(np.zeros((2, 0), np.float32), (), 5) == [[], []]
    assert classify(np.zeros((0, 3), np.float32), (), 5) == []


def test_nan_is_never_the_best_class() -> None:
    """A score that is no number goes last, and is shown as it is."""
    (row,) = classify(np.array([[np.nan, 0.5, np.nan, 0.2]], np.float32), LABELS, 3)
    assert [p["label"] for p in row] == ["bee", "dog", "ant"]
    assert np.isnan(row[2]["probability"])


def test_equal_scores_go_by_index() -> None:
    """The same row gives the same answer in every batch."""
    (row,) = classify(np.full((1, 100), 0.01, np.float32), (), 4)
    assert [p["index"] for p in row] == [0, 1, 2, 3]


@given(
    arrays.arrays(
        st.sampled_from([np.float16, np.float32, np.float64]),
        st.tuples(st.integers(0, 3), st.integers(0, 20)),
        elements=st.floats(-100, 100, width=16),
    ),
    st.integers(1, 25),
)
def test_the_answer_is_that_of_a_full_sort(scores: Array, top_k: int) -> None:
    """The shortcut (a partition) never changes the answer."""
    for row, predictions in zip(scores, classify(scores, (), top_k), strict=True):
        wanted = sorted(range(len(row)), key=lambda i: (-row[i], i))[:top_k]
        assert [p["index"] for p in predictions] == wanted
