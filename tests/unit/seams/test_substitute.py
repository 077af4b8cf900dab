# SPDX-License-Identifier: Apache-2.0
import string
import sys
from types import ModuleType

import pytest

from vllm.junctions.seams.substitute import rebind, substituted


@pytest.fixture
def module(monkeypatch):
    module = ModuleType("rebound")
    module.Worker, module.Client = "stock worker", "stock client"
    monkeypatch.setitem(sys.modules, "rebound", module)
    return module


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


def test_rebinding_sets_only_names_that_the_module_has(module):
    rebind("rebound", Worker="our worker", Thread="our thread")
    assert (module.Worker, module.Client) == ("our worker", "stock client")
    assert not hasattr(module, "Thread")


def test_a_stand_in_set_after_rebinding_stays(module):
    rebind("rebound", Worker="our worker", Client="our client")
    module.Client = "stand-in"
    with substituted("rebound", Worker="our worker", Client="our client"):
        assert (module.Worker, module.Client) == ("our worker", "stand-in")
