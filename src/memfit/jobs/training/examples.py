"""What is learned: running text or prompts with answers, as tokens, by which tokenizer, and which of them count.

Rows with `text` are running text. Rows with `instruction`, `input` and `output` (as Alpaca has them), or with `prompt`
and `completion`, are prompts with answers. A plain file is one long text. The tokenizer is the model's own, another
one's, or plain bytes, which needs no file.
"""

from __future__ import annotations

import os
import re
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from memfit.errors import InputError, UsageError
from memfit.jobs.text_files import KINDS, builtin_documents, builtin_origin, is_text_file, read_rows
from memfit.jobs.texts import fetch_file, find_split
from memfit.jobs.training.config import DataConfig
from memfit.models.files import find_source, load_tokenizer, tokenizer_folder
from memfit.models.gguf import gguf_file
from memfit.models.presets import find_preset

BUILTIN = "builtin"
PAIRS = (("instruction", "output"), ("prompt", "completion"), ("prompt", "response"))
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True, kw_only=True)
class Example:
    text: str
    prompt: str | None = None
    """What stands before the text and is not itself learned; None in running text."""
    context: str = ""
    """Alpaca's `input`."""


@dataclass(frozen=True, kw_only=True)
class Examples:
    origin: str
    instruction: bool
    rows: tuple[Example, ...]
    raw_prompt: bool = False
    """The prompts are used as they stand, without a template."""
    empty: int = 0
    """Rows without text, which are left out."""


def read_examples(config: DataConfig) -> Examples:
    origin, rows = _rows(config)
    rows = rows[: config.max_samples]
    if not rows:
        raise InputError(f"data.source {config.source!r} is empty ({origin})")
    columns = _columns(config, rows, origin)
    made = [_example(row, columns, f"{origin}, row {i}") for i, row in enumerate(rows, start=1)]
    kept = tuple(each for each in made if each.text.strip())
    if not kept:
        raise InputError(f"data.source {config.source!r}: none of its {len(rows):,} rows holds any text ({origin})")
    are_prompts, raw = len(columns) == 2, columns[0] == "prompt"
    return Examples(origin=origin, instruction=are_prompts, rows=kept, raw_prompt=raw, empty=len(made) - len(kept))


# -- where the rows come from ------------------------------------------------------------------------------------------


def source_of(config: DataConfig) -> str:
    """As typed. Nothing is trained on what nobody named: `builtin` is a word, not a default."""
    if config.source is None:
        raise InputError(
            "data.source is empty: nothing says what to train on",
            hint="a .txt, .jsonl, .json or .parquet file, a folder of these, a data set on the Hub; or `builtin`, the"
            " documentation that Python itself carries, to try it out",
        )
    return config.source.strip()


def _rows(config: DataConfig) -> tuple[str, list[Any]]:
    said = source_of(config)
    if said.lower() == BUILTIN:
        return builtin_origin(), list(builtin_documents())
    try:
        return _rows_at(Path(os.path.expanduser(said)), said, config)
    except OSError as error:  # a name that is too long, a folder that may not be entered
        raise InputError(f"data.source '{said}' cannot be looked at: {error.strerror or error}") from error


def _rows_at(path: Path, said: str, config: DataConfig) -> tuple[str, list[Any]]:
    if path.is_dir():
        files = sorted(each for each in path.rglob("*") if each.is_file() and is_text_file(each))
        if not files:
            raise InputError(f"data.source '{said}': no text, .jsonl, .json or .parquet file in that folder")
        return f"'{said}'", [row for each in files for row in read_rows(each)]
    if path.exists():
        return f"'{said}'", read_rows(path)
    _refuse_absent(path, said)
    return f"the Hugging Face Hub ({said}, {config.split})", _from_hub(config, said)


def _refuse_absent(path: Path, said: str) -> None:
    if _looks_like_a_file(path, said):
        raise InputError(f"data.source: no file '{said}'", hint=_near(path))
    if not _HUB_NAME.fullmatch(said):
        raise InputError(f"data.source '{said}' is no file and no name of a data set")


def check_there(config: DataConfig) -> None:
    """As much as can be known of texts without a tokenizer."""
    said = source_of(config)
    path = os.path.expanduser(said)
    if said.lower() != BUILTIN and not os.path.exists(path):
        _refuse_absent(Path(path), said)


def is_on_hub(source: str) -> bool:
    """Whether it is neither on this disk nor looks as if it should be."""
    said = source.strip()
    path = Path(os.path.expanduser(said))
    try:
        here = said.lower() == BUILTIN or path.exists() or _looks_like_a_file(path, said)
    except OSError:  # reading it says what is wrong
        return False
    return not here and _HUB_NAME.fullmatch(said) is not None


def _looks_like_a_file(path: Path, said: str) -> bool:
    kind = path.suffix.lower() in (*KINDS, ".gz")
    return kind or path.is_absolute() or said.startswith(".") or said.count("/") > 1


def _near(path: Path) -> str:
    try:
        there = [each.name for each in path.parent.iterdir()]
    except OSError:
        there = []
    if near := get_close_matches(path.name, there, n=2):
        return f"in that folder there is {' and '.join(repr(each) for each in near)}"
    return f"looked for in {path.parent.resolve()}"


def _from_hub(config: DataConfig, name: str) -> list[Any]:
    """File by file, until there are as many rows as asked for."""
    rows: list[Any] = []
    try:
        for file in find_split(name, config.subset, config.split):
            rows += read_rows(fetch_file(name, file))
            if config.max_samples is not None and len(rows) >= config.max_samples:
                break
    except InputError as error:
        hint = "give the path of a .txt, .jsonl, .json or .parquet file, or `builtin`"
        raise InputError(f"data.source '{name}': {error.message}", hint=error.hint or hint) from error
    return rows


# -- what is in them ---------------------------------------------------------------------------------------------------


def _columns(config: DataConfig, rows: list[Any], origin: str) -> tuple[str, ...]:
    """The column of text, or those of prompt and answer; by the first row, and the others are held to it."""
    first = rows[0]
    if isinstance(first, str):
        if config.format == "instruction":
            raise InputError(f"data.format instruction: {origin} is running text without prompts")
        return (config.text_column,)
    if not isinstance(first, Mapping):
        raise InputError(f"{origin}, row 1: neither text nor columns")
    pair = next((pair for pair in PAIRS if all(name in first for name in pair)), None)
    asks_for_pairs = config.format == "instruction" or (config.format == "auto" and config.text_column not in first)
    if pair is not None and asks_for_pairs:
        return pair
    if config.format != "instruction" and config.text_column in first:
        return (config.text_column,)
    of_pairs = "no 'instruction' and 'output', nor 'prompt' and 'completion'"
    wanted = of_pairs if config.format == "instruction" else f"no column {config.text_column!r}"
    raise InputError(f"{origin}: {wanted}; it has {_named(first)}", hint=_column_hint(config, first))


def _column_hint(config: DataConfig, row: Mapping[str, Any]) -> str:
    texts = [str(name) for name, value in row.items() if isinstance(value, str)]
    near = get_close_matches(config.text_column, texts, n=1) or texts[:1]
    return f"data.text_column: {near[0]} reads that column" if near else "no column of it holds text"


def _example(row: Any, columns: tuple[str, ...], where: str) -> Example:
    if isinstance(row, str):
        return Example(text=row)
    if len(columns) == 1:
        return Example(text=_text(row, columns[0], where))
    prompt, answer = (_text(row, name, where) for name in columns)
    context = row.get("input") or ""
    if not isinstance(context, str):
        raise InputError(f"{where}: 'input' is not text")
    return Example(text=answer, prompt=prompt, context=context)


def _text(row: Any, column: str, where: str) -> str:
    value = row.get(column) if isinstance(row, Mapping) else None
    if value is None and isinstance(row, Mapping) and column in row:
        return ""
    if not isinstance(value, str):
        has = f"; it has {_named(row)}" if isinstance(row, Mapping) else ""
        raise InputError(f"{where}: no text in {column!r}{has}")
    return value


def _named(row: Mapping[str, Any]) -> str:
    return ", ".join(repr(str(name)) for name in list(row)[:8])


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


BYTES = "bytes"
_HINT = "model.tokenizer: a folder with tokenizer.json, a hub id, or `bytes`, which needs no file"


class ByteTokenizer:
    """One token a byte of UTF-8, and one for the end of a text."""

    eos_token_id = 256
    pad_token_id = 256
    bos_token_id = None
    chat_template = None
    vocab_size = 257

    def __len__(self) -> int:
        return self.vocab_size

    def __call__(self, text: str | list[str], **_: Any) -> dict[str, Any]:
        if isinstance(text, str):
            return {"input_ids": list(text.encode())}
        return {"input_ids": [list(each.encode()) for each in text]}

    def decode(self, ids: list[int], **_: Any) -> str:
        return bytes(each for each in ids if each < 256).decode(errors="replace")


def tokenizer_named(name: str, *, cache_dir: str | None = None, say: Callable[[str], None] | None = None) -> Any:
    """`bytes`, a folder, a hub id or a GGUF file."""
    if name.strip().lower() == BYTES:
        return ByteTokenizer()
    folder = Path(name).expanduser()
    if folder.is_dir():
        return load_tokenizer(folder)
    if gguf_file(name) is not None:
        return load_tokenizer(find_source(name, cache_dir=cache_dir, say=say).folder)
    if (found := tokenizer_folder(name, cache_dir=cache_dir)) is None:
        raise InputError(f"model.tokenizer '{name}' is no folder and not on the Hub or in its cache", hint=_HINT)
    return load_tokenizer(found)


def tokenizer_of_shape(name: str, *, cache_dir: str | None = None) -> Any:
    """Of a model that is trained from scratch: that of the published one, if it can be had."""
    if Path(name).is_dir():
        return load_tokenizer(Path(name))
    preset = find_preset(name)
    hub_id = name if preset is None else next((alias for alias in preset.aliases if alias.count("/") == 1), name)
    if (found := tokenizer_folder(hub_id, cache_dir=cache_dir)) is None:
        raise InputError(f"the tokenizer of {name} is not on this machine, and the Hub does not give it", hint=_HINT)
    return load_tokenizer(found)


def pad_id_of(tokenizer: Any) -> int:
    """What fills up a row. It is masked, so that any token will do."""
    for name in ("pad_token_id", "eos_token_id", "unk_token_id"):
        found = getattr(tokenizer, name, None)
        if isinstance(found, int):
            return found
    return 0
