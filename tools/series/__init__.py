# SPDX-License-Identifier: Apache-2.0
"""The in-tree patch series: records of edits, and what applies them to a tree."""
