"""Hypothesis without timing: shared machines are slow at times, and that is no failure."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=100
)
settings.load_profile("untimed")
