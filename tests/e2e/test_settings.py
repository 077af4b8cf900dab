# SPDX-License-Identifier: Apache-2.0
"""Servers with the switch off, with bad settings, and under MultiConnector."""

import pytest

from benchmarks import junction_probe
from testbed.processes import ProcessFailed
from testbed.server import VllmServer, serving
from testbed.store import MooncakeMaster
from tests.e2e.client import ask, random_prompts, reset_local_cache


def _probe_hits(server, *args: str) -> dict[str, int]:
    parsed = junction_probe.parse_args(
        ["--base-url", server.base_url, "--diverge", "8", *args]
    )
    return {r.name: r.store_hit_tokens for r in junction_probe.probe(parsed).rows}


def _hits_and_keys(server: VllmServer, master: MooncakeMaster):
    answers = []
    for prompt in random_prompts("off", 3848, 1400, 600, 607):
        answers.append(ask(server, prompt))
        reset_local_cache(server)
    return answers, master.key_count()


def test_junctions_false_equals_a_server_without_the_plugin(tmp_path, make_server):
    """Same hits, same answers; and the log says that no hook is on."""
    with (
        MooncakeMaster(tmp_path / "off") as off_master,
        MooncakeMaster(tmp_path / "without") as without_master,
    ):
        off = make_server(
            mooncake_config=off_master.write_client_config(),
            junctions=False,
            weights_seed=1,
        )
        without = make_server(
            mooncake_config=without_master.write_client_config(),
            env={"VLLM_PLUGINS": ""},
            weights_seed=1,
        )
        with serving(off, without):
            outcome = _hits_and_keys(off, off_master)
            assert outcome == _hits_and_keys(without, without_master)
    assert [answer.store_hit_tokens for answer in outcome[0]] == [0, 0, 0]
    said = "junctions off by configuration"
    assert (said in off.log(), said in without.log()) == (True, False)
    assert not any("junctions on" in server.log() for server in (off, without))


def test_a_bad_setting_ends_the_start_before_a_model_is_loaded(
    fresh_master, make_server
):
    server = make_server(
        mooncake_config=fresh_master.write_client_config(),
        kv_transfer_config={"kv_connector_extra_config": {"junctions": "yes"}},
    )
    with pytest.raises(ProcessFailed, match="ended with status"):
        server.start()
    said = "ConfigurationError: Invalid value 'yes' for 'junctions'"
    assert said in server.log()
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
        declared = _probe_hits(server, "--seed", "12", "--declare")
    assert (hits["B"], hits["C"], hits["D"]) == (0, 3840, 3840)
    assert (declared["A"], declared["B"]) == (0, 3840)
    assert "junctions on" in server.log()
