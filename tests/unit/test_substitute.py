# SPDX-License-Identifier: Apache-2.0
import string

import pytest

from vllm.junctions.substitute import substituted


def test_a_global_points_elsewhere_inside_the_block_only():
    original = string.digits
    with substituted("string", digits="x", hexdigits="y"):
        assert (string.digits, string.hexdigits) == ("x", "y")
    assert string.digits == original


def test_it_points_back_after_an_exception():
    original = string.digits
    with pytest.raises(RuntimeError), substituted("string", digits="x"):
        raise RuntimeError
    assert string.digits == original


def test_an_unknown_global_changes_nothing():
    original = string.digits
    with pytest.raises(AttributeError), substituted("string", digits="x", nothing=1):
        pass
    assert string.digits == original
