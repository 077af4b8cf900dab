# SPDX-License-Identifier: Apache-2.0
"""Traffic as numbers: a line a finished request, without its text."""
