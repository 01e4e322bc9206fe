"""Settings shared by all tests: Hypothesis profiles, and one thread for each xdist worker."""

import os

UNDER_XDIST = "PYTEST_XDIST_WORKER" in os.environ
if UNDER_XDIST:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch loads; examples inherit it

import torch  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

if UNDER_XDIST:
    torch.set_num_threads(1)

settings.register_profile(
    "dev", deadline=None, derandomize=False, max_examples=100, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("ci", settings.get_profile("dev"), print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")
