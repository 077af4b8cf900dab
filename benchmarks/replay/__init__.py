# SPDX-License-Identifier: Apache-2.0
"""Replaying a trace of prompts through the store coordinators, without a model."""

import os

# Read when vLLM is imported, so before any module of this package imports it. A
# source tree without a distribution cannot tell which device it is for.
os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
