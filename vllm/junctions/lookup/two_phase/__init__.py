# SPDX-License-Identifier: Apache-2.0
"""Store lookups that ask only for the keys that could matter."""
