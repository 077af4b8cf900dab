# SPDX-License-Identifier: Apache-2.0
"""How a store lookup is asked and answered."""
