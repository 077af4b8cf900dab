# SPDX-License-Identifier: Apache-2.0
"""Hours of random traffic and faults on real servers, with everything checked."""
