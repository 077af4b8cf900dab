# SPDX-License-Identifier: Apache-2.0
"""Servers with the switch off, with bad settings, and under MultiConnector."""

import pytest

from benchmarks import junction_probe
from testbed.processes import ProcessFailed
from testbed.store import MooncakeMaster
from tests.e2e.client import ask, random_prompts, reset_local_cache


def _probe_hits(server, *args: str) -> dict[str, int]:
    parsed = junction_probe.parse_args(
        ["--base-url", server.base_url, "--diverge", "8", *args]
    )
    return {r.name: r.store_hit_tokens for r in junction_probe.probe(parsed).rows}


def test_junctions_false_equals_a_server_without_the_plugin(tmp_path, make_server):
    """Same hits, same answers; and the log says that no hook is on."""
    outcomes = []
    for name, junctions, env in (
        ("off", False, {}),
        ("without", None, {"VLLM_PLUGINS": ""}),
    ):
        with MooncakeMaster(tmp_path / name) as master:
            server = make_server(
                mooncake_config=master.write_client_config(),
                junctions=junctions,
                env=env,
                weights_seed=1,
            )
            with server:
                answers = []
                for prompt in random_prompts("off", 3848, 1400, 600, 607):
                    answers.append(ask(server, prompt))
                    reset_local_cache(server)
                outcomes.append((answers, master.key_count()))
                assert "junctions on" not in server.log()
                said = "junctions off by configuration" in server.log()
                assert said is (junctions is False)
    assert outcomes[0] == outcomes[1]
    assert [answer.store_hit_tokens for answer in outcomes[0][0]] == [0, 0, 0]


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"junctions": "yes"}, "Invalid value 'yes' for 'junctions'"),
        ({"junctions_depth": 2}, "Unknown key 'junctions_depth' (value 2)"),
    ],
)
def test_a_bad_setting_ends_the_start_before_a_model_is_loaded(
    fresh_master, make_server, extra, message
):
    server = make_server(
        mooncake_config=fresh_master.write_client_config(),
        kv_transfer_config={"kv_connector_extra_config": extra},
    )
    with pytest.raises(ProcessFailed, match="ended with status"):
        server.start()
    assert f"ConfigurationError: {message}" in server.log()
    assert "Starting to load model" not in server.log()


def test_under_multiconnector_siblings_hit_as_well(fresh_master, make_server):
    child = {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both"}
    server = make_server(
        mooncake_config=fresh_master.write_client_config(),
        kv_transfer_config={
            "kv_connector": "MultiConnector",
            "kv_connector_extra_config": {"connectors": [child]},
        },
    )
    with server:
        hits = _probe_hits(server, "--seed", "11")
    assert (hits["B"], hits["C"], hits["D"]) == (0, 3840, 3840)
    assert "junctions on" in server.log()
