# SPDX-License-Identifier: Apache-2.0
"""KV-cache groups of real models, for traces that do not say what was served.

A test compares them with the groups that vLLM makes of the models' layers.
"""

from vllm.junctions.record.format import GroupLayout, Layout


def _deepseek_v4_flash(name: str, mtp: bool) -> Layout:
    return Layout(
        name=name,
        summary="DeepSeek-V4-Flash, fp8 cache" + (", with MTP" if mtp else ""),
        groups=(
            GroupLayout("full", 256),
            GroupLayout("window", 4, 8),
            GroupLayout("window", 8, 128),
            GroupLayout("window", 64, 128, drops=mtp),
            GroupLayout("window", 64, 128, drops=mtp),
        ),
        scheduler_block_tokens=256,
        hash_block_tokens=4,
        block_bytes=1_002_240,
        speculative="mtp" if mtp else None,
    )


def _gemma3_12b() -> Layout:
    return Layout(
        name="gemma3-12b",
        summary="Gemma 3 12B in bfloat16, blocks of 16",
        groups=(
            GroupLayout("full", 16),
            *(GroupLayout("window", 16, 1024) for _ in range(5)),
        ),
        scheduler_block_tokens=16,
        hash_block_tokens=16,
        block_bytes=1 << 20,
    )


LAYOUTS = {
    layout.name: layout
    for layout in (
        _deepseek_v4_flash("deepseek-v4-flash", True),
        _deepseek_v4_flash("deepseek-v4-flash-no-mtp", False),
        _gemma3_12b(),
    )
}
DEFAULT_LAYOUT = "deepseek-v4-flash"
