# SPDX-License-Identifier: Apache-2.0
"""Coverage-guided fuzzing of what reads foreign input.

``make fuzz RUNS=n`` runs it: n inputs for the decoder of lookup answers, and as many
for the settings. What must hold is in ``tests/fuzz/targets.py``; an input that breaks
it is written to ``crash-*`` and ends the run.

    python -m tools.fuzz decoder -runs=1000000
"""

import struct
import sys
from collections.abc import Callable
from typing import Any

import atheris

# Branches taken in these are what guides the search; more of them make it slower.
_INSTRUMENTED = [
    "vllm.junctions.rules.boundaries",
    "vllm.junctions.config",
    "vllm.junctions.lookup.wire",
    "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.protocol",
]
# vLLM itself first, so that only its wire format is instrumented.
import vllm.distributed.kv_transfer.kv_connector.v1.base  # noqa: E402, F401

with atheris.instrument_imports(include=_INSTRUMENTED):
    from tests.fuzz.targets import LookupClient, check_config
    from vllm.junctions.lookup.wire import JUNCTION_GROUP_ID, HitUnits

_KEYS = ("junctions", "junctions_lookup_timeout_ms", "junction", "lookup_rpc_port", "")


def _payload(data: atheris.FuzzedDataProvider) -> bytes:
    if data.ConsumeBool():
        return data.ConsumeBytes(data.remaining_bytes())
    words = [data.ConsumeIntInRange(0, 6000)]
    for _ in range(data.ConsumeIntInRange(0, 5)):
        group = data.ConsumeIntInRange(0, 5)
        words.append(JUNCTION_GROUP_ID if group == 5 else group)
        words.append(data.ConsumeIntInRange(0, 6000))
    return struct.pack(f">{len(words)}I", *words)


def decoder() -> Callable[[bytes], None]:
    client = LookupClient()

    def run(raw: bytes) -> None:
        data = atheris.FuzzedDataProvider(raw)
        num_tokens = data.ConsumeIntInRange(0, 5000)
        hash_tokens = (1, 4, 16)[data.ConsumeIntInRange(0, 2)]
        block_tokens = hash_tokens * (1, 2, 64)[data.ConsumeIntInRange(0, 2)]
        hit = hash_tokens if data.ConsumeBool() else block_tokens
        units = HitUnits(hash_tokens, hit, block_tokens)
        client.check(_payload(data), num_tokens, units)

    return run


def _value(data: atheris.FuzzedDataProvider) -> Any:
    kinds: tuple[Callable[[], Any], ...] = (
        data.ConsumeBool,
        lambda: data.ConsumeInt(8),
        lambda: data.ConsumeIntInRange(-1, 3_600_001),
        data.ConsumeFloat,
        lambda: data.ConsumeUnicode(8),
        lambda: None,
        lambda: [data.ConsumeBool()],
        lambda: {data.ConsumeUnicode(4): data.ConsumeInt(2)},
    )
    return kinds[data.ConsumeIntInRange(0, len(kinds) - 1)]()


def config() -> Callable[[bytes], None]:
    def run(raw: bytes) -> None:
        data = atheris.FuzzedDataProvider(raw)
        extra_config = {}
        for _ in range(data.ConsumeIntInRange(0, 4)):
            key = _KEYS[data.ConsumeIntInRange(0, len(_KEYS) - 1)]
            if data.ConsumeBool():
                key += data.ConsumeUnicode(6)
            extra_config[key] = _value(data)
        check_config(extra_config)

    return run


_TARGETS = {"decoder": decoder, "config": config}


def main() -> None:
    target, *options = sys.argv[1:]
    atheris.Setup([sys.argv[0], *options], _TARGETS[target]())
    atheris.Fuzz()


if __name__ == "__main__":
    main()
