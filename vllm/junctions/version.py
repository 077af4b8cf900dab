# SPDX-License-Identifier: Apache-2.0
"""The version of this package, in the one place that its build reads too."""

__version__ = "0.1.0"
