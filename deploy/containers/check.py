"""Asks a composed fleet for predictions and holds them against what the model is known to answer.

Knows a gateway's address, a Redis address and the sample model's folder; knows nothing of
containers. The HTTP checks need the standard library alone, since they run on a bare host.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import json
import os
import signal
import statistics
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MODEL = "efficientnet-lite0"
CONTENT_TYPES = {".png": "image/png", ".jpg": "image/jpeg"}
# expected.json has four decimals; three of them are promised.
PROBABILITY_TOLERANCE = 0.0005
# Above the gateway's own limit, so that its answer is heard even when it is an error.
ANSWER_LIMIT_S = 60
CONCURRENCY = 24


class CheckFailed(Exception):
    """The fleet answered something else than it should; the message says what."""


Prediction = list[dict[str, Any]]


def check_prediction(image: str, got: Prediction, *, expected: Prediction) -> None:
    """Same labels in the same order, probabilities equal to three decimals."""
    for rank, (mine, theirs) in enumerate(zip(got, expected, strict=True), start=1):
        difference = abs(mine["probability"] - theirs["probability"])
        if mine["label"] != theirs["label"] or difference > PROBABILITY_TOLERANCE:
            raise CheckFailed(f"{image}, rank {rank}: got {mine}, expected {theirs}")


def samples(folder: Path) -> Iterator[tuple[Path, Prediction]]:
    """Each sample image of the model's folder with the prediction that it must get."""
    expected: dict[str, Prediction] = json.loads((folder / "expected.json").read_text())
    for name, prediction in sorted(expected.items()):
        yield folder / "images" / name, prediction


def ask_http(url: str, image: Path) -> dict[str, Any]:
    """The gateway's answer to one image."""
    request = urllib.request.Request(
        f"{url}/v1/models/{MODEL}/infer",
        data=image.read_bytes(),
        headers={"Content-Type": CONTENT_TYPES[image.suffix]},
    )
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_LIMIT_S) as response:
            answer: dict[str, Any] = json.load(response)
    except urllib.error.HTTPError as error:
        raise CheckFailed(f"{image.name}: HTTP {error.code}: {error.read().decode()}") from error
    return answer


def check_http(url: str, folder: Path) -> None:
    """Every sample image, by HTTP."""
    for image, expected in samples(folder):
        answer = ask_http(url, image)
        check_prediction(image.name, answer["prediction"], expected=expected)
        report(image.name, answer["prediction"], by=f"HTTP, worker {answer['worker']}")


def check_redis(url: str, folder: Path) -> None:
    """Every sample image, by the Python client straight through Redis."""
    from npufleet import Client

    with Client(url) as client:
        for image, expected in samples(folder):
            answer = client.infer(MODEL, image)
            check_prediction(image.name, answer.prediction, expected=expected)
            report(image.name, answer.prediction, by=f"Redis, worker {answer.worker}")


def check_spread(
    url: str, folder: Path, *, requests: int, workers: int, kill_pid: int | None
) -> None:
    """Many requests at once: each is answered rightly, and `workers` workers or more take part.

    With `kill_pid`, that process gets a SIGKILL once a fifth of the requests has been answered.
    """
    known = list(samples(folder))
    served: collections.Counter[str] = collections.Counter()
    latencies_ms: list[float] = []
    begun_s = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(CONCURRENCY) as pool:
        asked = {}
        for number in range(requests):
            image, expected = known[number % len(known)]
            asked[pool.submit(ask_http, url, image)] = (image.name, expected)
        for answered, future in enumerate(concurrent.futures.as_completed(asked), start=1):
            answer = future.result()
            name, expected = asked[future]
            check_prediction(name, answer["prediction"], expected=expected)
            served[answer["worker"]] += 1
            latencies_ms.append(answer["latency_ms"])
            if kill_pid is not None and answered == requests // 5:
                os.kill(kill_pid, signal.SIGKILL)
                print(f"  killed process {kill_pid} after {answered} answers")
    took_s = time.monotonic() - begun_s
    median_ms, slowest_ms = statistics.median(latencies_ms), max(latencies_ms)
    print(f"  {requests} requests, {requests} right answers in {took_s:.1f} s")
    print(f"  latency: median {median_ms:.0f} ms, slowest {slowest_ms:.0f} ms")
    print("  served:", ", ".join(f"{worker}: {count}" for worker, count in served.most_common()))
    if len(served) < workers:
        raise CheckFailed(f"{len(served)} workers took part, {workers} should have")


def report(image: str, prediction: Prediction, *, by: str) -> None:
    """One line for a person."""
    best = prediction[0]
    print(f"  {image:12} {best['label']:12} {best['probability']:.4f}  ({by})")


def main() -> int:
    """Runs the check named on the command line; 0 where all of it held, else 1."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("check", choices=["http", "redis", "spread"])
    parser.add_argument("url", help="of the gateway, or of Redis")
    parser.add_argument("folder", type=Path, help="of the sample model")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--kill-pid", type=int)
    options = parser.parse_args()
    try:
        if options.check == "http":
            check_http(options.url, options.folder)
        elif options.check == "redis":
            check_redis(options.url, options.folder)
        else:
            check_spread(
                options.url,
                options.folder,
                requests=options.requests,
                workers=options.workers,
                kill_pid=options.kill_pid,
            )
    except CheckFailed as failure:
        print(f"  FAILED: {failure}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
