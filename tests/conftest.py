"""Settings for all tests."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# A shared machine makes time limits on single examples a source of false alarms. CI repeats the same examples, so that a red
# run is about the change at hand; elsewhere every run looks at new ones.
settings.register_profile(
    "tandem", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=bool(os.environ.get("CI"))
)
settings.load_profile("tandem")
