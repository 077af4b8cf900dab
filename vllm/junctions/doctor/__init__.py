# SPDX-License-Identifier: Apache-2.0
"""``python -m vllm.junctions.doctor``: what is wrong with an installation."""
