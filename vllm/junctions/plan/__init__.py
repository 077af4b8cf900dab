# SPDX-License-Identifier: Apache-2.0
"""Would it help me? Replays recorded traffic under each way to keep tails.

Arithmetic over a tree of prefixes; no model, no store, and nothing of vLLM's.
"""
