# SPDX-License-Identifier: Apache-2.0
import pytest

from vllm.junctions import ConfigurationError
from vllm.junctions.config import JunctionsConfig
from vllm.junctions.rules.placement import MAX_TAILS


@pytest.mark.parametrize("value", [True, False])
def test_the_switch_is_read(value):
    assert JunctionsConfig.from_extra_config({"junctions": value}).junctions is value


def test_keys_of_the_stock_connector_are_left_alone():
    extra = {"load_async": "whatever", "cache_prefix": "a", "lookup_rpc_port": 7}
    assert JunctionsConfig.from_extra_config(extra) == JunctionsConfig()


@pytest.mark.parametrize("value", ["yes", "true", 1, 0, None, [True], {}, "\ud800"])
def test_a_wrong_type_names_key_value_and_what_is_accepted(value):
    with pytest.raises(ConfigurationError) as error:
        JunctionsConfig.from_extra_config({"junctions": value})
    text = str(error.value)
    assert "'junctions'" in text
    assert repr(value) in text
    assert '"junctions": true or false' in text


def test_an_unknown_key_under_our_prefix_is_refused():
    message = "Unknown key 'junctions_enabled' .value 3."
    with pytest.raises(ConfigurationError, match=message):
        JunctionsConfig.from_extra_config({"junctions_enabled": 3})


@pytest.mark.parametrize("value", [-1, MAX_TAILS + 1, 10**30, True, 1.0, "1", None])
def test_more_predicted_tails_than_there_can_be_say_what_is_accepted(value):
    with pytest.raises(ConfigurationError) as error:
        JunctionsConfig.from_extra_config({"junctions_predict": value})
    assert repr(value) in str(error.value)
    assert '"junctions_predict": 0 to 4 (default 0)' in str(error.value)


@pytest.mark.parametrize("value", [0, -1, 3_600_001, 10**30, True, 1.0, "5", None])
def test_a_timeout_out_of_range_says_what_is_accepted(value):
    with pytest.raises(ConfigurationError) as error:
        JunctionsConfig.from_extra_config({"junctions_lookup_timeout_ms": value})
    text = str(error.value)
    assert repr(value) in text
    assert '"junctions_lookup_timeout_ms": 1 to 3600000 (default 2000)' in text
