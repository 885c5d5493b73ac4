"""The likeliest classes of each row, with their labels. Knows nothing of models or requests."""

from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np

from npufleet.tensors import Array


@dataclass(frozen=True, slots=True)
class Classification:
    """How a model classifies: `output` names its scores (None: its first output)."""

    output: str | None
    labels: tuple[str, ...]
    top_k: int


class Prediction(TypedDict):
    """One class of one row; the probability is what the model said, not rounded."""

    label: str
    index: int
    probability: float


def classify(scores: Array, labels: tuple[str, ...], top_k: int) -> list[list[Prediction]]:
    """For each row of `scores` (rows, classes) its `top_k` best classes, the best first.

    Equal scores go by index, so that the answer does not depend on the batch; NaN comes last. A
    class beyond the labels is called by its number. More classes asked for than there are: all.
    """
    known = np.where(np.isnan(scores), -np.inf, scores) if scores.dtype.kind == "f" else scores
    count = min(top_k, scores.shape[1])
    return [
        [_prediction(row, int(index), labels) for index in _best(ranks, count)]
        for row, ranks in zip(scores, known, strict=True)
    ]


def _best(ranks: Array, count: int) -> list[int]:
    if count == 0:
        return []
    # All that are at least as good as the count-th best: partition alone would pick among equals
    # at random.
    threshold = np.partition(ranks, ranks.size - count)[ranks.size - count]
    candidates = np.flatnonzero(ranks >= threshold)
    order = np.argsort(-ranks[candidates].astype(np.float64), kind="stable")
    return [int(index) for index in candidates[order[:count]]]


def _prediction(row: Any, index: int, labels: tuple[str, ...]) -> Prediction:
    label = labels[index] if index < len(labels) else str(index)
    return {"label": label, "index": index, "probability": float(row[index])}
