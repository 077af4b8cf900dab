# SPDX-License-Identifier: Apache-2.0
"""How junctions get into a vLLM that lacks them; all of it goes away in-tree."""
