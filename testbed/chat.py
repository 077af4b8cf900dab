# SPDX-License-Identifier: Apache-2.0
"""A tokenizer and chat templates for the tiny models, and text for them to cut up."""

import random
from pathlib import Path

import msgspec

from testbed.models import GEMMA3

_SPECIAL = ["<pad>", "<eos>", "<bos>", "<turn>", "<end>"]
_SYLLABLES = [
    "ka",
    "lo",
    "mi",
    "ren",
    "to",
    "sha",
    "vel",
    "qui",
    "ast",
    "or",
    "ben",
    "du",
    "fli",
    "gra",
    "hem",
]

# As Gemma's: texts are trimmed, a system message waits for the first user's, and roles
# have to alternate.
TURNS = """{{ bos_token }}
{%- set ns = namespace(system='') -%}
{%- for m in messages -%}
  {%- if m.content is string -%}{%- set text = m.content | trim -%}
  {%- else -%}{%- set parts = namespace(text='') -%}
    {%- for part in m.content -%}
      {%- set parts.text = parts.text + (part['text'] | trim) -%}
    {%- endfor -%}{%- set text = parts.text -%}
  {%- endif -%}
  {%- if m.role == 'system' -%}{%- set ns.system = text + '\\n\\n' -%}
  {%- else -%}
    {%- if loop.index0 and messages[loop.index0 - 1].role == m.role -%}
      {{ raise_exception('roles have to alternate') }}
    {%- endif -%}
    {{ '<turn>' + m.role + '\\n' + ns.system + text + '<end>\\n' }}
    {%- set ns.system = '' -%}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<turn>assistant\\n' }}{%- endif -%}"""

# Reasoning is rendered behind the last user message only; tools come first.
THINKING = """{{ bos_token }}
{%- if tools -%}
  {{ '<turn>tools\\n' }}
  {%- for tool in tools -%}{{ tool | tojson + '\\n' }}{%- endfor -%}{{ '<end>\\n' }}
{%- endif -%}
{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}
  {%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for m in messages -%}
  {{ '<turn>' + m.role + '\\n' }}
  {%- if m.reasoning and loop.index0 > ns.last -%}
    {{ '<think>' + m.reasoning + '</think>' }}
  {%- endif -%}
  {{ (m.content or '') + '<end>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<turn>assistant\\n' }}{%- endif -%}"""

# Only the last two messages are rendered.
FORGETFUL = """{{ bos_token }}
{%- for m in messages[-2:] -%}
  {{ '<turn>' + m.role + '\\n' + m.content + '<end>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<turn>assistant\\n' }}{%- endif -%}"""

# The last message comes first.
QUESTION_FIRST = """{{ bos_token }}
{{- '<turn>question\\n' + messages[-1].content + '<end>\\n' -}}
{%- for m in messages[:-1] -%}
  {{ '<turn>' + m.role + '\\n' + m.content + '<end>\\n' }}
{%- endfor -%}"""


def words(seed: object, count: int) -> str:
    """Return made-up sentences, the same for the same seed: about 1.5 tokens a word."""
    rng = random.Random(str(seed))
    made = []
    for number in range(count):
        word = "".join(rng.choices(_SYLLABLES, k=rng.randint(1, 4)))
        made.append(word + ("." if number % 11 == 10 else ""))
    return " ".join(made)


def write_tokenizer(folder: Path, template: str = TURNS) -> None:
    """Write a byte-level BPE tokenizer of a tiny model's vocabulary to its folder.

    Args:
        folder: The model's, with its ``config.json``.
        template: Its chat template.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=GEMMA3.config["vocab_size"] - 64,
        special_tokens=_SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([words(n, 400) for n in range(20)], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "eos_token": "<eos>",
        "bos_token": "<bos>",
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_bytes(msgspec.json.encode(config))
