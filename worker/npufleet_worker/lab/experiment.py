"""A tuning from end to end: measure, sweep, rehearse. Knows nothing of files and tables."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from npufleet.errors import ConfigurationError
from npufleet_worker.batching import BatchPolicy
from npufleet_worker.decoder import Request
from npufleet_worker.lab import tuning
from npufleet_worker.lab.measuring import Care, measure, rehearse
from npufleet_worker.lab.profile import GearTime, Profile
from npufleet_worker.lab.progress import Advance
from npufleet_worker.lab.samples import Sample, from_files, made_up
from npufleet_worker.lab.simulation import Device, Load, Point
from npufleet_worker.lab.trial import Room, Trial, open_trial
from npufleet_worker.lab.tuning import Choice, Goal
from npufleet_worker.repository import Batching, ModelConfig

USUAL_ROWS = 32
"""The largest batch to try where neither the model nor the caller names one."""

_DIFFERENT_ROWS = 32
_SEED = 20
_REHEARSALS = 5
_LEAST_REQUESTS = 200
_SLOWER = 0.75
_KEPT_PACE = 0.9
_FLOOD_S = 1.0
_FLOOD_RATE = 1.2
_FLOOD_REQUESTS = (500, 50_000)
_HOST_IS_ENOUGH = 0.9


class Bars(Protocol):
    """Makes a progress bar of so many steps."""

    def __call__(self, total: int) -> AbstractContextManager[Advance]: ...


@dataclass(frozen=True, slots=True)
class Plan:
    """What to find out: `rehearse_s` is the length of each run in real time, 0 for none."""

    goal: Goal
    care: Care
    largest_rows: int | None = None
    samples: tuple[Path, ...] = ()
    rehearse_s: float = 5.0


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """The setting in real time: all that was tried, and the last one, where it met the goal."""

    tried: tuple[Point, ...]
    confirmed: Point | None


@dataclass(frozen=True, slots=True)
class Findings:
    """All that was found out. `choice` is None where no gear settled, `rehearsal` with no need."""

    times: tuple[GearTime, ...]
    device: Device | None
    choice: Choice | None
    curve: tuple[Point, ...]
    rehearsal: Rehearsal | None


async def tune(config: ModelConfig, plan: Plan, room: Room, bars: Bars) -> Findings:
    """Measures the model in a process of its own; ConfigurationError or ModelFailed on the way."""

    def change(batching: Batching) -> Batching:
        return widened(batching, plan.largest_rows)

    async with open_trial(config, room, change=change) as trial:
        rows = trial.place(_samples(trial, plan))
        with bars(len(trial.gears)) as advance:
            times = await measure(trial, rows, care=plan.care, advance=advance)
        settled = [time for time in times if time.settled]
        if not settled:
            return Findings(tuple(times), None, None, (), None)
        batching = trial.config.batching
        device = Device(Profile(settled), batching.gears, batching.min_batch_size)
        device = await _with_its_host(trial, rows, device, plan)
        policies = _policies(config, device, plan.goal)
        with bars(len(policies)) as advance:
            choice = tuning.sweep(device, policies, plan.goal, advance=advance)
        curve: tuple[Point, ...] = ()
        rehearsal = None
        if choice.chosen is not None:
            curve = tuple(tuning.curve(device, choice.chosen.policy, plan.goal))
            if plan.rehearse_s:
                with bars(_REHEARSALS) as advance:
                    rehearsal = await _rehearse(
                        trial, rows, device=device, plan=plan, chosen=choice.chosen, advance=advance
                    )
        return Findings(tuple(times), device, choice, curve, rehearsal)


def widened(batching: Batching, largest_rows: int | None) -> Batching:
    """The batching with the largest batch that is to be tried as its limit."""
    if batching.gears:
        fitting = [gear for gear in batching.gears if gear <= (largest_rows or gear)]
        most = max(fitting, default=0)
    else:
        most = largest_rows or max(USUAL_ROWS, batching.max_batch_size)
    if most < batching.min_batch_size or not most:
        raise ConfigurationError(
            f"no batch of at most {largest_rows} rows can be run: the model has "
            f"min_batch_size {batching.min_batch_size} and gears {list(batching.gears)}"
        )
    return batching.model_copy(update={"max_batch_size": most})


def _samples(trial: Trial, plan: Plan) -> list[Sample]:
    if plan.samples:
        return from_files(trial.signature, plan.samples)
    image, count = trial.config.image, min(_DIFFERENT_ROWS, trial.gears[-1])
    return made_up(trial.signature, image=image, count=count, seed=_SEED)


def _policies(config: ModelConfig, device: Device, goal: Goal) -> list[BatchPolicy]:
    """What to try, the setting of today among it."""
    sizes = [time.gear for time in device.profile.times]
    adaptive = config.batching.policy == "adaptive"
    policies = tuning.candidates(sizes, goal, adaptive=adaptive)
    today = today_of(config)
    if today.max_batch_size in sizes and today not in policies:
        policies.append(today)
    return policies


def today_of(config: ModelConfig) -> BatchPolicy:
    """The setting that the model has."""
    batching = config.batching
    adaptive = batching.policy == "adaptive"
    return BatchPolicy(batching.max_batch_size, batching.max_wait_ms, adaptive=adaptive)


async def _with_its_host(
    trial: Trial, rows: Sequence[Request], device: Device, plan: Plan
) -> Device:
    """The device, and what this process can feed it where that is less: found by a flood."""
    best, size = device.profile.best_rows_per_s, device.profile.times[-1].gear
    least, most = _FLOOD_REQUESTS
    load = Load(_FLOOD_RATE * best, min(max(least, int(best * _FLOOD_S)), most))
    if load.requests > load.rate * _FLOOD_S:
        return device  # too slow for a host to matter
    seen = await rehearse(trial, rows, BatchPolicy(size, 0.0), device, load)
    if seen.rate > _HOST_IS_ENOUGH * best:
        return device
    return replace(device, host_rows_per_s=seen.rate)


async def _rehearse(
    trial: Trial,
    rows: Sequence[Request],
    *,
    device: Device,
    plan: Plan,
    chosen: tuning.Verdict,
    advance: Advance,
) -> Rehearsal:
    """In real time, at the rate of the simulation, and slower until the goal is met."""
    assert chosen.best is not None
    rate, tried = chosen.best.rate, []
    for attempt in range(_REHEARSALS):
        requests = max(_LEAST_REQUESTS, int(rate * plan.rehearse_s))
        load = Load(rate, requests, plan.goal.seed + attempt)
        seen = await rehearse(trial, rows, chosen.policy, device, load)
        tried.append(seen)
        advance("in real time")
        if plan.goal.met(seen) and seen.rate >= _KEPT_PACE * rate:
            return Rehearsal(tuple(tried), seen)
        rate = _SLOWER * min(rate, max(seen.rate, 1e-3))
    return Rehearsal(tuple(tried), None)
