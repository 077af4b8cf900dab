# SPDX-License-Identifier: Apache-2.0
"""Arithmetic over token positions; knows nothing of vLLM."""
