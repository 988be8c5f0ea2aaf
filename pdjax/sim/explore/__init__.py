"""The exhaustive checker: every state of a bounded world around the real core (``explore``)."""

from pdjax.sim.explore.config import ASSUMPTIONS, Ask, Config
from pdjax.sim.explore.menu import SEARCHES
from pdjax.sim.explore.search import Report, Violation, explore

__all__ = ["ASSUMPTIONS", "Ask", "Config", "Report", "SEARCHES", "Violation", "explore"]
