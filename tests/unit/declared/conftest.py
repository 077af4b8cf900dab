# SPDX-License-Identifier: Apache-2.0
"""vLLM's own renderer over a small tokenizer, as an API server has them."""

import asyncio
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.config import KVTransferConfig, ModelConfig, VllmConfig
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.renderers.registry import renderer_from_config
from vllm.v1.engine.input_processor import InputProcessor

from testbed.chat import TURNS, write_tokenizer
from testbed.models import GEMMA3
from vllm.junctions.declared.hooks import HOOKS
from vllm.junctions.metrics.counted import MARKS
from vllm.junctions.metrics.front_end import FRONT_END


class FrontEnd:
    """What of an API server lies between a request and its engine."""

    def __init__(self, folder: Path, connector: str | None, extra: dict | None) -> None:
        transfer = connector and KVTransferConfig(
            kv_connector=connector,
            kv_role="kv_both",
            kv_connector_extra_config=extra or {},
        )
        self.config = VllmConfig(
            model_config=ModelConfig(str(folder), dtype="float32", max_model_len=8192),
            kv_transfer_config=transfer or None,
        )
        self.renderer = renderer_from_config(self.config)
        self.online = OnlineRenderer(
            self.config.model_config,
            self.renderer,
            request_logger=None,
            chat_template=None,
            chat_template_content_format="auto",
        )
        self.inputs = InputProcessor(self.config, self.renderer)

    def rendered(self, messages: list[dict], **fields: Any) -> dict[str, Any]:
        """The prompt that the engine gets."""
        return self._render(messages, fields)[1]

    def params(self, messages: list[dict], **fields: Any) -> dict[str, Any] | None:
        """The ``kv_transfer_params`` that the scheduler gets."""
        request, prompt = self._render(messages, fields)
        made = self.inputs.process_inputs(
            "r", prompt, request.to_sampling_params(8, {}), ("generate",)
        )
        return (made.sampling_params.extra_args or {}).get("kv_transfer_params")

    def positions(self, messages: list[dict], **fields: Any) -> list[int]:
        return (self.params(messages, **fields) or {}).get("junctions", [])

    def _render(self, messages: list[dict], fields: dict[str, Any]) -> tuple[Any, Any]:
        request = ChatCompletionRequest(model="m", messages=messages, **fields)
        (_, (prompt,)) = asyncio.run(self.online.render_chat(request))
        return request, prompt


@pytest.fixture
def marks_on() -> Iterator[None]:
    HOOKS.install()
    try:
        yield
    finally:
        HOOKS.uninstall()


@pytest.fixture(scope="session")
def make_front_end(tmp_path_factory) -> Callable[..., FrontEnd]:
    """Makes front ends, one a template and connector."""
    made: dict[Any, FrontEnd] = {}

    def make(
        template: str = TURNS,
        connector: str | None = "MooncakeStoreConnector",
        extra: dict | None = None,
        tokenizer: Path | None = None,
    ) -> FrontEnd:
        key = (template, connector, str(extra), tokenizer)
        if key not in made:
            folder = tmp_path_factory.mktemp("model")
            GEMMA3.write(folder)
            write_tokenizer(folder / GEMMA3.name, template)
            if tokenizer is not None:
                shutil.copy(tokenizer, folder / GEMMA3.name)
            made[key] = FrontEnd(folder / GEMMA3.name, connector, extra)
        return made[key]

    return make


@pytest.fixture
def outcomes() -> Iterator[Callable[[], dict[str, float]]]:
    """What became of the marks since the last call."""

    def taken() -> dict[str, float]:
        return {
            record["labels"][0]: record["value"]
            for record in FRONT_END.take()
            if record["name"] == MARKS.name
        }

    taken()
    yield taken
    taken()
