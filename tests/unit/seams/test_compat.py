# SPDX-License-Identifier: Apache-2.0
import pytest

from vllm.junctions import UnsupportedRuntimeError
from vllm.junctions.seams import compat


@pytest.mark.parametrize(
    "version", ["0.32.0", "0.32.1.dev3+g12", "0.33.0+cu130", "0.33.2rc1"]
)
def test_supported_versions(version):
    assert compat.is_supported_version(version)


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0", "1.32.0", "dev", ""])
def test_unsupported_versions(version):
    assert not compat.is_supported_version(version)


def test_a_changed_signature_is_named_with_both_sides():
    seam = compat.Seam(
        f"{compat.STORE_WORKER}:MooncakeStoreWorker.lookup", ("num_tokens", "hashes")
    )
    with pytest.raises(UnsupportedRuntimeError) as error:
        compat.check_seams([seam])
    assert "('num_tokens', 'block_hashes')" in str(error.value)
    assert "('num_tokens', 'hashes')" in str(error.value)


def test_this_vllm_has_no_junctions_of_its_own():
    assert not compat.has_native_core()
    assert not compat.has_native_store()


def test_a_new_required_parameter_does_not_fit(monkeypatch):
    def lookup(self, num_tokens, block_hashes, salt): ...

    def bearable(self, num_tokens, block_hashes, salt=None, *args, **kwargs): ...

    target = f"{compat.STORE_WORKER}:MooncakeStoreWorker.lookup"
    seam = compat.Seam(target, ("num_tokens", "block_hashes"))
    worker = compat.resolve(target)[0]
    monkeypatch.setattr(worker, "lookup", bearable)
    compat.check_seams([seam])
    monkeypatch.setattr(worker, "lookup", lookup)
    with pytest.raises(UnsupportedRuntimeError, match="'salt'"):
        compat.check_seams([seam])


@pytest.mark.usefixtures("core_hooks")
def test_our_own_hooks_are_not_taken_for_vllms():
    assert not compat.has_native_core()
