# SPDX-License-Identifier: Apache-2.0
"""What a client declares through the API serves the first sibling elsewhere."""

from pathlib import Path

from testbed.models import LLAMA_EAGLE
from testbed.server import VllmServer, serving
from tests.e2e.client import ask, random_prompts, reset_local_cache


def _hits_of_the_first_sibling(one: VllmServer, two: VllmServer) -> tuple[int, int]:
    """Return what B hits on ``two``, locally and in the store, after A on ``one``."""
    a, b = random_prompts("declared", 3840, 1400, 600)
    ask(one, a, kv_transfer_params={"junctions": [3840], "of another connector": 1})
    reset_local_cache(one)  # once its saves have landed
    answer = ask(two, b)
    return answer.local_hit_tokens, answer.store_hit_tokens


def test_the_first_sibling_on_a_fresh_instance_hits(trio) -> None:
    assert _hits_of_the_first_sibling(trio["one"], trio["two"]) == (0, 3840)


def test_with_eagle_it_hits_a_block_less(fresh_master, make_server) -> None:
    config = fresh_master.write_client_config()
    one, two = (make_server(LLAMA_EAGLE, mooncake_config=config) for _ in range(2))
    with serving(one, two):
        assert _hits_of_the_first_sibling(one, two) == (0, 3808)


def test_what_is_no_position_is_served_and_counted(trio) -> None:
    one = trio["one"]
    bad, worse = random_prompts("bad", 64, 200, 220)
    ask(one, bad, kv_transfer_params={"junctions": [-1, "x", [2]]})
    ask(one, worse, kv_transfer_params={"junctions": {"a": True}})
    assert "only counted (not_a_list)" in one.log()


def test_the_code_of_the_documentation_does_what_it_says(trio) -> None:
    page = Path(__file__).parents[2] / "docs" / "first-siblings.md"
    code = page.read_text().split("```python\n")[1].split("```")[0]
    one, two = trio["one"], trio["two"]
    for example, real in (
        ("http://127.0.0.1:8000", one.base_url),
        ("MODEL", one.model),
    ):
        assert example in code
        code = code.replace(example, real)
    names: dict = {}
    exec(code, names)
    assert names["answer"].usage.completion_tokens == 16
    reset_local_cache(one)
    sibling = names["document"] + list(range(300, 900))
    answer = ask(two, sibling)
    assert (answer.local_hit_tokens, answer.store_hit_tokens) == (0, 3840)
