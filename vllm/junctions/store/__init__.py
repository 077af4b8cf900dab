# SPDX-License-Identifier: Apache-2.0
"""Junctions in the Mooncake store; modules are named like vLLM's ``mooncake/store``."""
