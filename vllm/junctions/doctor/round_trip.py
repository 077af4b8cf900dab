# SPDX-License-Identifier: Apache-2.0
"""One put, get and remove under a key of its own, as a process of its own.

Run as a file, it imports Mooncake and nothing of vLLM: its time is the store's.
"""

import json
import os
import sys
import time
import uuid
from typing import Any

KEY_PREFIX = "vllm-junctions-doctor/"
_VALUE_BYTES = 4096


def main(setup: str) -> int:
    """Print one line that begins with ``round trip:``; return the exit status.

    Args:
        setup: JSON list of what ``MooncakeDistributedStore.setup`` takes, and an
            object with its keywords at the end.
    """
    from mooncake.store import MooncakeDistributedStore

    *arguments, keywords = json.loads(setup)
    store = MooncakeDistributedStore()
    if (status := store.setup(*arguments, **keywords)) != 0:
        problem = f"the client could not be set up ({status})"
    else:
        problem = _round_trip(store)
    store.close()
    if problem:
        print(f"round trip: {problem}", flush=True)
    return int(bool(problem))


def _round_trip(store: Any) -> str:
    key = KEY_PREFIX + uuid.uuid4().hex
    value = os.urandom(_VALUE_BYTES)
    start = time.perf_counter()
    if (status := store.put(key, value)) != 0:
        return f"put failed with {status}"
    try:
        found = store.get(key)
    finally:
        # By force: the read holds a lease on it, and that was only us.
        status = store.remove(key, True)
    if found != value:
        return f"get returned {len(found)} bytes that are not those put"
    if status != 0:
        return f"remove failed with {status}"
    milliseconds = (time.perf_counter() - start) * 1e3
    print(f"round trip: put, get and remove in {milliseconds:.0f} ms", flush=True)
    return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
