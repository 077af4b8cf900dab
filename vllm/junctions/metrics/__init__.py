# SPDX-License-Identifier: Apache-2.0
"""What is counted, and how it reaches ``/metrics``."""
