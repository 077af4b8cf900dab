# SPDX-License-Identifier: Apache-2.0
"""How many examples a law is tried on: ``JUNCTIONS_EXAMPLES``, by default 1,000."""

import os

from hypothesis import HealthCheck, Phase, settings

settings.register_profile(
    "laws",
    max_examples=int(os.environ.get("JUNCTIONS_EXAMPLES", "1000")),
    deadline=None,
    # An example starts threads and sockets; generating it is the cheap part.
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.target, Phase.shrink],
    print_blob=True,
)
settings.load_profile("laws")
