# SPDX-License-Identifier: Apache-2.0
"""A step of vLLM's scheduler as a repair hands it on."""

import copy
from typing import Any


def step_with(scheduler_output: Any, **fields: Any) -> Any:
    """Return a step with some fields replaced; the original stays as it is.

    Args:
        scheduler_output: The step.
        fields: New values by name.
    """
    step = copy.copy(scheduler_output)
    for name, value in fields.items():
        setattr(step, name, value)
    return step
