# SPDX-License-Identifier: Apache-2.0
"""A forward pass without a model: it reads and writes fingerprints.

For every scheduled request it checks what attention would read, and writes what
the layers would. Block tables are kept as a model runner keeps them, from the
scheduler's output alone.
"""

from collections.abc import Callable

import numpy as np
import torch
from vllm.v1.core.sched.output import SchedulerOutput

from testbed.box.fingerprints import SLOT_BYTES, Sequence
from testbed.box.layout import Group, Layout

_NULL_BLOCK_ID = 0


class WrongKV(AssertionError):
    """The KV that a request would read is not its own."""


class FakeModelRunner:
    """KV memory, block tables and the forward pass over them.

    Attributes:
        num_early_copies: Blocks that were copied in the step that wrote them, and so
            before it did.
    """

    def __init__(self, layout: Layout, num_blocks: int) -> None:
        self._layout = layout
        page_bytes = layout.units_per_page * SLOT_BYTES
        self._memory = torch.empty((num_blocks, page_bytes), dtype=torch.int8)
        # One slot per hash unit. Never-written memory must not look like KV.
        self.slots = self._memory.numpy().view(np.uint64)
        self.slots[:] = np.uint64(0xDEADBEEF)
        self.block_tables: dict[str, tuple[list[int], ...]] = {}
        self.num_early_copies = 0
        self._state_column: dict[tuple[str, int], int] = {}

    def kv_caches(self) -> dict[str, torch.Tensor]:
        """Return KV memory by layer; groups lie over each other, as in vLLM."""
        return {
            f"layer.{index}": self._memory for index in range(len(self._layout.groups))
        }

    def forward(
        self, output: SchedulerOutput, sequence_of: Callable[[str], Sequence]
    ) -> dict[str, list[int]]:
        """Run one step; return the sampled tokens by request.

        Raises:
            WrongKV: A request would have read KV that is not its own.
        """
        starts = self._update_tables(output)
        for block_id in output.new_block_ids_to_zero or ():
            self.slots[block_id] = 0
        self._count_early_copies(output, starts)
        for copy in output.kv_cache_block_copies or ():
            self.slots[copy.dst_block_id] = self.slots[copy.src_block_id]
        sampled = {}
        for req_id, num_tokens in output.num_scheduled_tokens.items():
            sequence = sequence_of(req_id)
            start = starts[req_id]
            # Draft tokens, if any, come last, and the fake model rejects them all.
            drafts = output.scheduled_spec_decode_tokens.get(req_id, ())
            end = start + num_tokens - len(drafts)
            self._check(req_id, sequence, start)
            sampled[req_id] = []
            if end == len(sequence.tokens):
                sampled[req_id] = [sequence.next_sample()]
                sequence.extend(sampled[req_id])
            self._write(req_id, sequence, start, end)
        return sampled

    def _count_early_copies(
        self, output: SchedulerOutput, starts: dict[str, int]
    ) -> None:
        copied = {copy.src_block_id for copy in output.kv_cache_block_copies or ()}
        if not copied:
            return
        written = set()
        for req_id, num_tokens in output.num_scheduled_tokens.items():
            start = starts[req_id]
            for group, table in zip(
                self._layout.groups, self.block_tables[req_id], strict=True
            ):
                if group.kind != "mamba":
                    first = start // group.block_tokens
                    end = -(-(start + num_tokens) // group.block_tokens)
                    written |= set(table[first:end])
        self.num_early_copies += len(copied & written)

    def _update_tables(self, output: SchedulerOutput) -> dict[str, int]:
        """Bring block tables up to date; return computed tokens by request."""
        for req_id in (*output.finished_req_ids, *(output.preempted_req_ids or ())):
            self._forget(req_id)
        starts = {}
        for new in output.scheduled_new_reqs:
            self._forget(new.req_id)
            self.block_tables[new.req_id] = tuple(list(ids) for ids in new.block_ids)
            starts[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for index, req_id in enumerate(cached.req_ids):
            starts[req_id] = cached.num_computed_tokens[index]
            new_block_ids = cached.new_block_ids[index]
            if req_id in cached.resumed_req_ids:
                self._forget(req_id)
                self.block_tables[req_id] = tuple(list(ids) for ids in new_block_ids)
            elif new_block_ids is not None:
                for table, ids in zip(
                    self.block_tables[req_id], new_block_ids, strict=True
                ):
                    table.extend(ids)
        return starts

    def _forget(self, req_id: str) -> None:
        self.block_tables.pop(req_id, None)
        for group_id in range(len(self._layout.groups)):
            self._state_column.pop((req_id, group_id), None)

    def _check(self, req_id: str, sequence: Sequence, start: int) -> None:
        if start == 0:
            return
        for group_id, group in enumerate(self._layout.groups):
            table = self.block_tables[req_id][group_id]
            if group.kind == "mamba":
                self._check_state(req_id, sequence, start, group_id, table)
            else:
                self._check_attention(req_id, sequence, start, group_id, table)

    def _check_attention(
        self, req_id: str, sequence: Sequence, start: int, group_id: int, table: list
    ) -> None:
        group = self._layout.groups[group_id]
        unit_tokens = self._layout.hash_tokens
        first_token = (
            max(start - group.window_tokens + 1, 0) if (group.window_tokens) else 0
        )
        first, end = first_token // unit_tokens, start // unit_tokens
        found = self._gather(group, table, first, end)
        wrong = np.flatnonzero(found != sequence.units(group_id, first, end))
        if len(wrong):
            raise WrongKV(
                f"{req_id} at {start}: group {group_id} ({group.kind}) holds wrong KV "
                f"for tokens {(first + int(wrong[0])) * unit_tokens} and on"
            )

    def _gather(self, group: Group, table: list, first: int, end: int) -> np.ndarray:
        per_block = group.block_tokens // self._layout.hash_tokens
        units = np.arange(first, end)
        blocks = np.asarray(table, dtype=np.int64)[units // per_block]
        return self.slots[blocks, units % per_block]

    def _check_state(
        self, req_id: str, sequence: Sequence, start: int, group_id: int, table: list
    ) -> None:
        block_tokens = self._layout.groups[group_id].block_tokens
        column = self._state_column.get((req_id, group_id), (start - 1) // block_tokens)
        self._state_column[req_id, group_id] = column
        if self.slots[table[column], 0] != sequence.state(group_id, start):
            raise WrongKV(
                f"{req_id} at {start}: group {group_id} (mamba) holds another state"
            )

    def _write(self, req_id: str, sequence: Sequence, start: int, end: int) -> None:
        for group_id, group in enumerate(self._layout.groups):
            table = self.block_tables[req_id][group_id]
            if group.kind == "mamba":
                column = -(-end // group.block_tokens) - 1
                block_id = self._writable(req_id, group_id, table[column])
                self.slots[block_id] = sequence.state(group_id, end)
                self._state_column[req_id, group_id] = column
            else:
                self._write_attention(req_id, sequence, start, end, group_id, table)

    def _write_attention(
        self,
        req_id: str,
        sequence: Sequence,
        start: int,
        end: int,
        group_id: int,
        table: list,
    ) -> None:
        group = self._layout.groups[group_id]
        unit_tokens = self._layout.hash_tokens
        first, last = start // unit_tokens, end // unit_tokens
        per_block = group.block_tokens // unit_tokens
        units = np.arange(first, last)
        blocks = np.asarray(table, dtype=np.int64)[units // per_block]
        for block_id in np.unique(blocks):
            self._writable(req_id, group_id, int(block_id))
        self.slots[blocks, units % per_block] = sequence.units(group_id, first, last)
        if end % unit_tokens:
            block_id = self._writable(req_id, group_id, table[last // per_block])
            # No prefix ends here yet: whoever reads this as KV is wrong.
            self.slots[block_id, last % per_block] = 0

    def _writable(self, req_id: str, group_id: int, block_id: int) -> int:
        if block_id == _NULL_BLOCK_ID:
            raise WrongKV(f"{req_id}: group {group_id} would write the null block")
        return block_id
