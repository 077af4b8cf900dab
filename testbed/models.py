# SPDX-License-Identifier: Apache-2.0
"""Tiny hybrid models with random weights, for which a server starts in seconds."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from testbed.plugins import write_plugin

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 1024,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}

_HYBRID_LAYERS = ["sliding_attention"] * 3 + ["full_attention"]


@dataclass(frozen=True)
class TinyModel:
    """A model that the test bed can serve.

    Attributes:
        name: What ``MODEL=`` selects it by.
        summary: One line for people.
        config: Its ``config.json``.
        block_tokens: Tokens per scheduler block.
        proof_tokens: Tokens past a position that an EAGLE sibling must share to
            hit there; 0 without EAGLE.
        draft_config: ``config.json`` of its EAGLE draft, if any.
        num_speculative_tokens: Drafted tokens per step.
        server_args: Further arguments of the server.
        plugin: Function that every process of the server calls first, as
            ``package.module:function``; None: nothing.
    """

    name: str
    summary: str
    config: dict[str, Any]
    block_tokens: int
    proof_tokens: int = 0
    draft_config: dict[str, Any] | None = None
    num_speculative_tokens: int = 2
    server_args: tuple[str, ...] = field(default=())
    plugin: str | None = None

    def write(self, directory: Path, weights_seed: int | None = None) -> list[str]:
        """Write the model; return the server arguments that use it.

        Args:
            directory: Where its folders go.
            weights_seed: Seed of weights large enough for outputs to depend on
                the cache; None leaves it to the server's own, nearly zero ones.
        """
        target = _write_config(directory / self.name, self.config)
        arguments = [
            "--model",
            str(target),
            "--block-size",
            str(self.block_tokens),
            *self.server_args,
        ]
        if weights_seed is not None:
            _write_weights(target, weights_seed)
            arguments += ["--load-format", "safetensors"]
        if self.draft_config is not None:
            draft = _write_config(directory / f"{self.name}-draft", self.draft_config)
            speculative = {
                "method": "eagle",
                "model": str(draft),
                "num_speculative_tokens": self.num_speculative_tokens,
            }
            arguments += [
                "--speculative-config",
                msgspec.json.encode(speculative).decode(),
            ]
        return arguments

    def env(self, directory: Path) -> dict[str, str]:
        """Write what the server's environment must name; return that environment."""
        if self.plugin is None:
            return {}
        name = f"{self.name.replace('-', '_')}_stand_ins"
        return write_plugin(directory / "plugins", name, self.plugin)

    def expected_hit_tokens(self, shared_tokens: int) -> int:
        """Return where siblings that share ``shared_tokens`` tokens should hit.

        The last scheduler block boundary within the shared prefix; with EAGLE the
        last one whose proof block is shared too. Blocks of 256 with a proof of 64:
        3848 shared tokens give 3584, 4000 give 3840.
        """
        usable = shared_tokens - self.proof_tokens
        return max(usable, 0) // self.block_tokens * self.block_tokens


def _write_config(directory: Path, config: dict[str, Any]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_bytes(msgspec.json.encode(config))
    return directory


def _write_weights(directory: Path, seed: int) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.from_pretrained(directory)
    # The usual 0.02 leaves a net this small with almost uniform predictions.
    config.initializer_range = 0.3
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    written = (directory / "config.json").read_bytes()
    model.save_pretrained(directory)
    (directory / "config.json").write_bytes(written)


GEMMA3 = TinyModel(
    name="gemma3-tiny",
    summary="Gemma 3 architecture: 3 sliding-window layers (64), 1 full",
    config={
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 1024,
        "max_position_embeddings": 16384,
        "sliding_window": 64,
        "layer_types": _HYBRID_LAYERS,
        "rms_norm_eps": 1e-6,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 32,
        "rope_theta": 10000.0,
        "rope_local_base_freq": 10000.0,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "torch_dtype": "float32",
    },
    block_tokens=32,
)

LLAMA_EAGLE = TinyModel(
    name="llama-eagle-tiny",
    summary="Llama, 3 sliding-window layers (64), 1 full, with an EAGLE draft",
    config={
        **_LLAMA,
        "num_hidden_layers": 4,
        "sliding_window": 64,
        "layer_types": _HYBRID_LAYERS,
    },
    draft_config={**_LLAMA, "num_hidden_layers": 1},
    block_tokens=32,
    proof_tokens=32,
)

# The real architecture, narrow. Its kernels fix head_dim, index_head_dim and
# index_topk; compress ratios give one layer with a window only, two with the
# indexer and one that reads every 128th state.
DEEPSEEK_V4 = TinyModel(
    name="deepseek-v4-tiny",
    summary="DeepSeek-V4: groups of 64, 64, 256, 4, 8 tokens per block",
    config={
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "compress_ratios": [0, 4, 128, 4],
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 128,
        "o_lora_rank": 64,
        "o_groups": 2,
        "sliding_window": 128,
        "index_n_heads": 8,
        "index_head_dim": 128,
        "index_topk": 512,
        "n_routed_experts": 128,
        "num_experts_per_tok": 6,
        "n_shared_experts": 1,
        "moe_intermediate_size": 64,
        "expert_dtype": "bf16",
        "num_hash_layers": 1,
        "norm_topk_prob": True,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 10.0,
        "hidden_act": "silu",
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "rms_norm_eps": 1e-6,
        "vocab_size": 1024,
        "max_position_embeddings": 16384,
        "rope_theta": 10000.0,
        "compress_rope_theta": 160000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 16,
            "original_max_position_embeddings": 65536,
            "beta_fast": 32,
            "beta_slow": 1,
        },
        "num_nextn_predict_layers": 0,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "bfloat16",
    },
    block_tokens=256,
    server_args=(
        *("--dtype", "bfloat16"),
        *("--load-format", "random"),
        *("--max-model-len", "8192"),
    ),
    plugin="testbed.deepseek_v4.stand_ins:register",
)

MODELS = {model.name: model for model in (GEMMA3, LLAMA_EAGLE, DEEPSEEK_V4)}
DEFAULT_MODEL = GEMMA3.name
