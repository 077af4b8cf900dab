# SPDX-License-Identifier: Apache-2.0
import pytest

from tests.support import request
from vllm.junctions.core import CORE_HOOKS
from vllm.junctions.core.request import (
    LocalJunction,
    focused,
    set_store_junctions,
    shared_prefix_boundaries,
)

pytestmark = pytest.mark.usefixtures("core_hooks")


def test_a_new_request_has_no_junction():
    r = request()
    assert r.shared_prefix_boundary == 0
    assert r.shared_prefix_boundaries == ()


def test_the_scalar_reads_as_it_was_assigned():
    r = request()
    r.shared_prefix_boundary = 3840
    assert r.shared_prefix_boundary == 3840
    assert r.shared_prefix_boundaries == (3840,)


def test_a_local_lookup_hands_over_all_its_positions():
    r = request()
    r.shared_prefix_boundary = LocalJunction(3840, (3584, 3840))
    assert r.shared_prefix_boundary == 3840
    assert type(r.shared_prefix_boundary) is int
    assert r.shared_prefix_boundaries == (3584, 3840)


def test_the_tuple_is_the_union_of_local_and_store():
    r = request()
    r.shared_prefix_boundary = LocalJunction(512, (256, 512))
    set_store_junctions(r, (512, 3840))
    assert r.shared_prefix_boundaries == (256, 512, 3840)


def test_a_retry_assigns_the_local_part_and_keeps_the_store_part():
    r = request()
    set_store_junctions(r, (3584, 3840))
    r.shared_prefix_boundary = 0
    assert r.shared_prefix_boundaries == (3584, 3840)
    r.shared_prefix_boundary = 512
    assert r.shared_prefix_boundaries == (512, 3584, 3840)


def test_a_further_store_lookup_replaces_the_store_part():
    r = request()
    r.shared_prefix_boundary = 512
    set_store_junctions(r, (3840,))
    set_store_junctions(r, (4096,))
    assert r.shared_prefix_boundaries == (512, 4096)
    set_store_junctions(r, ())
    assert r.shared_prefix_boundaries == (512,)


def test_single_junction_code_sees_the_position_in_focus_only():
    r = request()
    r.shared_prefix_boundary = 512
    set_store_junctions(r, (3840,))
    with focused(r, 3840):
        assert r.shared_prefix_boundary == 3840
    assert r.shared_prefix_boundary == 512


def test_the_focus_ends_with_an_exception_too():
    r = request()
    with pytest.raises(RuntimeError), focused(r, 3840):
        raise RuntimeError
    assert r.shared_prefix_boundary == 0


def test_a_request_outlives_the_hooks():
    r = request()
    r.shared_prefix_boundary = LocalJunction(3840, (3584, 3840))
    CORE_HOOKS.uninstall()
    assert r.shared_prefix_boundary == 3840
    assert shared_prefix_boundaries(r) == (3584, 3840)


def test_a_request_older_than_the_hooks_is_read_too():
    CORE_HOOKS.uninstall()
    r = request()
    r.shared_prefix_boundary = 256
    CORE_HOOKS.install()
    assert r.shared_prefix_boundary == 256
    assert r.shared_prefix_boundaries == ()
    r.shared_prefix_boundary = 256
    assert r.shared_prefix_boundaries == (256,)
