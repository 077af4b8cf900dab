# SPDX-License-Identifier: Apache-2.0
"""Faults of stock vLLM that are mended in passing; knows nothing of junctions."""
