"""The properties of protocol §10, checked by name while a simulated world runs."""

from pdjax.sim.properties.base import Property, Violation
from pdjax.sim.properties.monitor import NOT_SHOWN, PROPERTIES, SENTENCES, Monitor

__all__ = ["Monitor", "NOT_SHOWN", "PROPERTIES", "Property", "SENTENCES", "Violation"]
