# SPDX-License-Identifier: Apache-2.0
"""Store coordinator whose masks keep the tails at junctions."""

from collections.abc import Sequence

from vllm.junctions.lookup.coordinator import LookupCoordinator

# ``mask[g][i]`` is True iff the i-th chunk of group ``g`` is written; None: all are.
GroupMasks = tuple[list[bool] | None, ...]


class JunctionStoreCoordinator(LookupCoordinator):
    """The stock coordinator, plus junctions found and junction tails stored."""

    def store_mask(
        self,
        aligned_token_len: int,
        start_token: int = 0,
        num_prompt_tokens: int | None = None,
        boundaries: Sequence[int] = (),
    ) -> GroupMasks:
        """Per-group store masks, with the tails at ``boundaries`` kept as well.

        ``mask[g][i]`` is True iff the i-th chunk of group ``g`` after
        ``start_token`` should be written. ``None`` (all of them) stays ``None``,
        and a Mamba group stays all False: its states travel with boundary puts.

        A junction's tail is a replay boundary's tail. The stock mask already knows
        how to keep that, EAGLE proof block included, for a prompt of a given
        length; so for each junction it is asked about the prompt whose replay
        boundary lies there.

        Source: extends ``MooncakeStoreCoordinator.store_mask``.

        Args:
            aligned_token_len: Tokens that the masks reach to.
            start_token: Tokens before the first chunk of the masks.
            num_prompt_tokens: Prompt length for the request's own replay tails.
            boundaries: Token positions of junctions; those past
                ``aligned_token_len`` have no effect yet.
        """
        masks = super().store_mask(aligned_token_len, start_token, num_prompt_tokens)
        return self.with_tails(masks, aligned_token_len, start_token, boundaries)

    def with_tails(
        self,
        masks: GroupMasks,
        aligned_token_len: int,
        start_token: int,
        boundaries: Sequence[int],
    ) -> GroupMasks:
        """Return store masks with the tails at ``boundaries`` kept as well.

        Args:
            masks: For the range that the lengths give.
            aligned_token_len: As for :meth:`store_mask`, like the rest.
            start_token: Likewise.
            boundaries: Likewise.
        """
        for position in boundaries:
            if position <= 0:
                continue
            tails = super().store_mask(
                aligned_token_len,
                start_token,
                self._prompt_replaying_at(position),
            )
            masks = tuple(
                _union(mask, tail) for mask, tail in zip(masks, tails, strict=True)
            )
        return masks

    def _prompt_replaying_at(self, position: int) -> int:
        """Length of a prompt whose only replay boundary is ``position``.

        One token more than the boundary; with EAGLE, whose replay resumes one
        scheduler block below the last full one, one block more on top.
        """
        if self.eagle_group_ids:
            return position + self.lcm_block_size + 1
        return position + 1


def _union(mask: list[bool] | None, other: list[bool] | None) -> list[bool] | None:
    if mask is None or other is None:
        return None
    return [keep or also for keep, also in zip(mask, other, strict=True)]
