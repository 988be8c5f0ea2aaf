"""Contracts of the ports in engine/ports.py as test classes: every implementation, real or simulated, runs under them.

An implementation subclasses a contract and gives it a ``pair`` fixture. Contracts know no JAX and no real time.
"""
