"""Settings for tests: timers far shorter than the defaults and sound among themselves, so that a simulated world is soon
at rest; and a value of each setting that is not its default.
"""

from pdjax.core.settings import PDSettings

QUICK = PDSettings(
    lease_s=2.0,
    peer_timeout_s=0.6,
    hello_interval_s=0.1,
    answer_bound_s=0.1,
    bootstrap_timeout_s=3.0,
    transfer_timeout_s=3.0,
    limbo_timeout_s=5.0,
    request_timeout_s=20.0,
    graveyard_timeout_s=8.0,
)


def another_value(spec):
    """Of a field of PDSettings: a legal value, not the default."""
    choices = spec.metadata["choices"]
    return choices[-1] if choices else True if spec.default is False else spec.default + 1
