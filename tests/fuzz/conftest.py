# SPDX-License-Identifier: Apache-2.0
"""As many examples as for the laws."""

from tests.property import conftest as _laws  # noqa: F401
