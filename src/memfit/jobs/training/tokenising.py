"""Examples as tokens, and which of the tokens are learned."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from memfit.errors import UsageError
from memfit.jobs.training.config import DataConfig
from memfit.jobs.training.examples import Example, Examples

AT_ONCE = 1000
"""Examples handed to the tokenizer together: it works in parallel."""
WITH_CONTEXT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{context}\n\n### Response:\n"
)
WITHOUT_CONTEXT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)


@dataclass(frozen=True, slots=True)
class Tokens:
    ids: array[int]
    """32-bit integers: as Python's own, a large text would take ten times the memory."""
    unlearned: int
    """So many at the beginning are the prompt."""


def tokenise(examples: Examples, config: DataConfig, tokenizer: Any) -> Iterator[Tokens]:
    """Each example with the tokenizer's own beginning, and the end of a text after it."""
    for start in range(0, len(examples.rows), AT_ONCE):
        some = examples.rows[start : start + AT_ONCE]
        if examples.instruction:
            yield from _answers(examples, some, config, tokenizer)
        else:
            for ids in _ids(tokenizer, [each.text for each in some], special=True):
                yield Tokens(array("i", _ended(ids, tokenizer)), 0)


def _answers(examples: Examples, some: tuple[Example, ...], config: DataConfig, tokenizer: Any) -> Iterator[Tokens]:
    chat = config.template == "chat" and not examples.raw_prompt
    prompts = [_prompt(each, examples, config, tokenizer) for each in some]
    before = _ids(tokenizer, prompts, special=not chat)  # a chat template writes its own beginning
    after = _ids(tokenizer, [each.text for each in some], special=False)
    for prompt, answer in zip(before, after, strict=True):
        if prompt and prompt[-1] == tokenizer.eos_token_id and not chat:
            del prompt[-1]  # some tokenizers end every text
        ids = array("i", [*prompt, *_ended(answer, tokenizer)])
        yield Tokens(ids, len(prompt) if config.mask_prompt else 0)


def _prompt(example: Example, examples: Examples, config: DataConfig, tokenizer: Any) -> str:
    assert example.prompt is not None
    if examples.raw_prompt:
        return example.prompt
    if config.template == "chat":
        if not getattr(tokenizer, "chat_template", None):
            raise UsageError("data.template chat: this tokenizer has no chat template", hint="template: alpaca works")
        asked = f"{example.prompt}\n\n{example.context}" if example.context else example.prompt
        messages = [{"role": "user", "content": asked}]
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    template = WITH_CONTEXT if example.context else WITHOUT_CONTEXT
    return template.format(instruction=example.prompt, context=example.context)


def _ids(tokenizer: Any, texts: list[str], *, special: bool) -> list[list[int]]:
    return [list(ids) for ids in tokenizer(texts, add_special_tokens=special, verbose=False)["input_ids"]]


def _ended(ids: list[int], tokenizer: Any) -> list[int]:
    end = tokenizer.eos_token_id
    return ids if end is None or (ids and ids[-1] == end) else [*ids, end]
