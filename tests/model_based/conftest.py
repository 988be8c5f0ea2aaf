"""Profiles: ci (deterministic, half a minute), nightly (HYPOTHESIS_PROFILE=nightly)."""

import os

from hypothesis import HealthCheck, Phase, settings

COMMON = {"deadline": None, "suppress_health_check": list(HealthCheck)}
settings.register_profile(
    "ci", max_examples=80, stateful_step_count=25, derandomize=True, database=None, print_blob=False, **COMMON
)
settings.register_profile("nightly", max_examples=2000, stateful_step_count=60, **COMMON)
settings.register_profile(
    "quick", max_examples=5, derandomize=True, database=None, phases=[Phase.generate], **COMMON
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
