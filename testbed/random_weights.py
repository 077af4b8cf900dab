# SPDX-License-Identifier: Apache-2.0
"""Random weights of a trained model's scale, as a load format of vLLM.

vLLM's own ``dummy`` format draws every tensor from the same thousandth around zero,
norms included: what attention reads then hardly reaches the output, and wrong KV
would go unnoticed.
"""

import math
import zlib

import torch
from torch import nn
from vllm.config import ModelConfig
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

LOAD_FORMAT = "random"


def register() -> None:
    """Make ``--load-format random`` known to this process."""
    register_model_loader(LOAD_FORMAT)(RandomWeightsLoader)


class RandomWeightsLoader(BaseModelLoader):
    """Draws each weight from its name, so that every server gets the same."""

    def download_model(self, model_config: ModelConfig) -> None:
        """Nothing to download."""

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        for name, parameter in model.named_parameters():
            if parameter.is_floating_point():
                parameter.data.copy_(random_weight(name, parameter))


def random_weight(name: str, like: torch.Tensor) -> torch.Tensor:
    """Return a weight for the parameter ``name`` in the shape of ``like``.

    Matrices keep the scale of what they multiply, norms are around 1, embeddings
    have unit variance, and other vectors (sinks, biases) are around 0.
    """
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    noise = torch.randn(like.shape, generator=generator)
    if like.dim() == 1:
        return noise * 0.1 + (1.0 if name.endswith("norm.weight") else 0.0)
    if "embed" in name:
        return noise
    return noise / math.sqrt(like.shape[-1])
