# SPDX-License-Identifier: Apache-2.0
"""What becomes of a mark."""

from enum import Enum


class MarkOutcome(Enum):
    """What became of a mark; all but ``TAKEN`` leave the request as it is without."""

    TAKEN = "taken"
    MALFORMED = "malformed"
    NOT_TEXT = "not_text"
    MEDIA = "media"
    TOO_MANY = "too_many"
    NO_TEXT_PROMPT = "no_text_prompt"
    TRUNCATED = "truncated"
    NOT_RENDERED = "not_rendered"
    DIFFERS = "differs"
    POSITIONS_UNUSABLE = "positions_unusable"
    FAILED = "failed"

    @property
    def meaning(self) -> str:
        """Why the mark is ignored, to go on with after "ignored:"."""
        return _MEANINGS[self]


_MEANINGS = {
    MarkOutcome.TAKEN: "it is not",
    MarkOutcome.MALFORMED: 'cache_control is not {"type": "ephemeral"}',
    MarkOutcome.NOT_TEXT: "it is on a part that is no text",
    MarkOutcome.MEDIA: "the messages carry images, audio, video or embeddings",
    MarkOutcome.TOO_MANY: "only the last four positions of a request count",
    MarkOutcome.NO_TEXT_PROMPT: "the model's renderer makes tokens, not text",
    MarkOutcome.TRUNCATED: "the request asks to truncate its prompt",
    MarkOutcome.NOT_RENDERED: "the chat template does not render the marked part",
    MarkOutcome.DIFFERS: "the text up to the mark depends on what follows it",
    MarkOutcome.POSITIONS_UNUSABLE: (
        "the request's own kv_transfer_params hold junctions that are no ascending list"
    ),
    MarkOutcome.FAILED: "its messages could not be rendered a second time",
}
