# SPDX-License-Identifier: Apache-2.0
"""What a client declares through the API serves the first sibling elsewhere."""

from pathlib import Path

import pytest

from testbed.models import GEMMA3, LLAMA_EAGLE, TinyModel
from testbed.server import serving
from tests.e2e.client import ask, random_prompts, reset_local_cache


@pytest.mark.parametrize("model", [GEMMA3, LLAMA_EAGLE], ids=lambda model: model.name)
def test_the_first_sibling_on_a_fresh_instance_hits(
    fresh_master, make_server, model: TinyModel
) -> None:
    config = fresh_master.write_client_config()
    one = make_server(model, mooncake_config=config)
    two = make_server(model, mooncake_config=config)
    a, b = random_prompts("declared", 3840, 1400, 600)
    declared = {"junctions": [3840], "of another connector": 1}
    bad, worse = random_prompts("bad", 64, 200, 220)
    with serving(one, two):
        ask(one, bad, kv_transfer_params={"junctions": [-1, "x", [2]]})
        ask(one, worse, kv_transfer_params={"junctions": {"a": True}})
        ask(one, a, kv_transfer_params=declared)
        reset_local_cache(one)  # once its saves have landed
        answer = ask(two, b)
        assert "only counted (not_a_list)" in one.log()
    expected = model.expected_hit_tokens(3840)
    assert (answer.local_hit_tokens, answer.store_hit_tokens) == (0, expected)
    assert expected == (3840 if model is GEMMA3 else 3808)


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
