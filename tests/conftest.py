"""For every test: JAX on the CPU, and compiled programs kept between runs and shared by all processes.

Only compiled code is kept, so no test can see another one's data.
"""

import os
from pathlib import Path

CACHE = Path(__file__).parent.parent / ".cache" / "jax"

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
