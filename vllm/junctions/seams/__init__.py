# SPDX-License-Identifier: Apache-2.0
"""What of vLLM is replaced, wrapped or called, and how; knows nothing of junctions."""
