# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from torch import nn

from testbed.random_weights import RandomWeightsLoader, random_weight


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(500, 64, dtype=torch.bfloat16)
        self.attn_norm = nn.RMSNorm(64)
        self.up = nn.Linear(64, 400)
        self.table = nn.Parameter(torch.arange(6), requires_grad=False)


def _loaded() -> _Model:
    model = _Model()
    RandomWeightsLoader.load_weights(None, model, None)
    return model


def test_two_models_get_the_same_weights():
    one, two = _loaded().state_dict(), _loaded().state_dict()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_weights_of_different_names_differ():
    like = torch.empty(8, 8)
    assert not torch.equal(random_weight("a", like), random_weight("b", like))


def test_a_matrix_keeps_the_scale_of_what_it_multiplies():
    out = _loaded().up.weight @ torch.randn(64, 100)
    assert out.std().item() == pytest.approx(1, abs=0.1)


def test_norms_are_around_one_and_biases_around_zero():
    model = _loaded()
    assert model.attn_norm.weight.mean().item() == pytest.approx(1, abs=0.05)
    assert model.up.bias.mean().item() == pytest.approx(0, abs=0.05)


def test_dtypes_stay_and_integers_are_left_alone():
    model = _loaded()
    assert model.embed_tokens.weight.dtype == torch.bfloat16
    assert model.table.tolist() == [0, 1, 2, 3, 4, 5]
