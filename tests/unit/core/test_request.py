# SPDX-License-Identifier: Apache-2.0
import pytest

from tests.support import find_locally, request
from vllm.junctions.core import CORE_HOOKS
from vllm.junctions.core.request import (
    set_junctions,
    shared_prefix_boundaries,
    with_scalar,
)


@pytest.mark.usefixtures("core_hooks")
def test_each_part_is_replaced_by_itself():
    r = request()
    find_locally(r, 512)
    set_junctions(r, store=(3840,))
    find_locally(r)
    assert r.shared_prefix_boundaries == (3840,)
    find_locally(r, 512)
    set_junctions(r, store=())
    assert r.shared_prefix_boundaries == (512,)


def test_the_scalar_stays_vllms():
    r = request()
    find_locally(r, 256, 512)
    set_junctions(r, store=(3840,))
    assert with_scalar(r, 3840).shared_prefix_boundary == 3840
    assert r.shared_prefix_boundary == 512


def test_a_request_outlives_the_hooks(core_hooks):
    r = request()
    find_locally(r, 3584, 3840)
    CORE_HOOKS.uninstall()
    assert shared_prefix_boundaries(r) == (3584, 3840)


@pytest.mark.parametrize("known", [(), (512,)])
def test_a_core_that_keeps_several_itself_is_given_the_stores(monkeypatch, known):
    cls = type(request())
    monkeypatch.setattr(cls, "shared_prefix_boundaries", known, raising=False)
    r = request()
    set_junctions(r, store=(3584, 3840))
    assert r.shared_prefix_boundaries == (*known, 3584, 3840)
    assert shared_prefix_boundaries(r) == (*known, 3584, 3840)


def test_a_core_with_a_place_for_a_connectors_gets_them_there(monkeypatch):
    cls = type(request())
    monkeypatch.setattr(cls, "external_prefix_boundaries", (), raising=False)
    monkeypatch.setattr(
        cls,
        "shared_prefix_boundaries",
        property(lambda self: self.external_prefix_boundaries),
        raising=False,
    )
    r = request()
    set_junctions(r, store=(3840,))
    assert r.shared_prefix_boundaries == (3840,)
    set_junctions(r, store=())
    assert r.shared_prefix_boundaries == ()
