"""`--dataset`: where the text for calibration and for perplexity comes from.

    wikitext2   WikiText-2 raw, train for calibration and test for perplexity
    c4          C4, one document at a time
    builtin     the reference that Python itself carries, English on every machine; every fourth topic is kept for tests
    PATH        a text file, .jsonl or .json with "text" in each row, .parquet, also .gz; or a folder of these

A named set is looked for in the folder that MEMFIT_DATA names (`wikitext-2-raw/wiki.{train,valid,test}.raw`,
`c4/*.jsonl`), then in the cache of the Hugging Face Hub, then on the Hub. WikiText-2 is a Parquet file there, which the
extra memfit[data] reads; C4 is compressed JSON, which needs nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from memfit.errors import InputError, UnknownName
from memfit.jobs.texts.builtin import builtin_documents, builtin_origin
from memfit.jobs.texts.files import PARQUET_HINT, is_text_file, lines_of, read_documents
from memfit.jobs.texts.hub import fetch_file, find_cached

Use = Literal["calibration", "evaluation"]
NAMES = ("wikitext2", "c4", "builtin")
VARIABLE = "MEMFIT_DATA"

WIKITEXT_FILE = "wiki.{}.raw"
JOINED_TEST = "wikitext2_test_joined.txt"
WIKITEXT_REPOS = ("Salesforce/wikitext", "wikitext")
"""On the Hub; the second is its old name, under which the public pruning code has put it into many caches."""
WIKITEXT_FILES: Mapping[Use, str] = {
    "calibration": "wikitext-2-raw-v1/train-00000-of-00001.parquet",
    "evaluation": "wikitext-2-raw-v1/test-00000-of-00001.parquet",
}
C4_REPOS = ("allenai/c4",)
C4_FILES: Mapping[Use, str] = {
    "calibration": "en/c4-train.00000-of-01024.json.gz",
    "evaluation": "en/c4-validation.00000-of-00008.json.gz",
}
C4_VALIDATION_DOCUMENTS = 1100


@dataclass(frozen=True, kw_only=True)
class Texts:
    name: str
    split: str
    origin: str
    """Where it was found, in words."""
    documents: Sequence[str]
    joint: str = " "
    """What stands between two documents where all of them are read as one text."""
    by_document: bool = False
    """Windows lie within one document, as C4 is sampled."""
    notes: tuple[str, ...] = ()

    def joined(self) -> str:
        return self.joint.join(self.documents)


def find_texts(name: str, use: Use) -> Texts:
    """The text that a name or a path means. Nothing is tokenised yet; the rows are read."""
    key = name.strip()
    if key.lower() in NAMES:
        found = {"wikitext2": _wikitext2, "c4": _c4, "builtin": _builtin}[key.lower()](use)
    else:
        found = _path(key, use)
    if not any(document.strip() for document in found.documents):
        raise InputError(f"--dataset {name!r} holds no text ({found.origin})")
    return found


def is_on_this_machine(name: str) -> bool:
    """Whether `find_texts` would fetch nothing for it."""
    key = name.strip().lower()
    if key == "wikitext2":
        return _local_wikitext("calibration") is not None or _is_cached(WIKITEXT_REPOS, WIKITEXT_FILES["calibration"])
    return key != "c4" or bool(_local_c4("calibration")[0]) or _is_cached(C4_REPOS, C4_FILES["calibration"])


def check_packages(name: str) -> None:
    """Before anything is fetched: whether what the Hub has of a named set could be read."""
    if name.strip().lower() == "wikitext2" and _local_wikitext("calibration") is None:
        _check_parquet("wikitext2")


# -- named sets --------------------------------------------------------------------------------------------------------


def _wikitext2(use: Use) -> Texts:
    local = _local_wikitext(use)
    if local is not None:
        return local
    split = "test" if use == "evaluation" else "train"
    rows = _from_hub("wikitext2", WIKITEXT_REPOS, WIKITEXT_FILES[use])
    return _wikitext(split, "the Hugging Face Hub (Salesforce/wikitext)", rows)


def _wikitext(split: str, origin: str, rows: Sequence[str], notes: tuple[str, ...] = ()) -> Texts:
    joint = "\n\n" if split == "test" else " "
    return Texts(name="wikitext2", split=split, origin=origin, documents=rows, joint=joint, notes=notes)


def _local_wikitext(use: Use) -> Texts | None:
    root = _data_folder()
    if root is None:
        return None
    return next((found for folder in _near(root) if (found := _wikitext_folder(folder, use)) is not None), None)


def _wikitext_folder(folder: Path, use: Use) -> Texts | None:
    """The rows of the set on the Hub are the lines of these files; a blank line is an empty row there."""
    for split in ("test",) if use == "evaluation" else ("train", "valid"):
        path = folder / WIKITEXT_FILE.format(split)
        if path.is_file():
            rows = [line if line.strip() else "" for line in lines_of(path)]
            notes: tuple[str, ...] = ()
            if split == "valid":
                notes = (f"the train split of WikiText-2 is not in '{folder}': calibrated on its validation split",)
            return _wikitext(split, str(path), rows, notes)
    path = folder / JOINED_TEST
    if use == "evaluation" and path.is_file():
        return _wikitext("test", str(path), ["".join(lines_of(path))])
    return None


def _c4(use: Use) -> Texts:
    files, notes = _local_c4(use)
    if files:
        documents: Sequence[str] = [document for path in files for document in read_documents(path)]
        origin = ", ".join(str(path) for path in files)
    else:
        documents = _from_hub("c4", C4_REPOS, C4_FILES[use])
        origin = f"the Hugging Face Hub (allenai/c4, {C4_FILES[use]})"
    if use == "evaluation":
        documents = documents[:C4_VALIDATION_DOCUMENTS]
    split = "validation" if use == "evaluation" else "train"
    return Texts(
        name="c4", split=split, origin=origin, documents=documents, by_document=use == "calibration", notes=notes
    )


def _local_c4(use: Use) -> tuple[list[Path], tuple[str, ...]]:
    root = _data_folder()
    if root is None or not (root / "c4").is_dir():
        return [], ()
    there = sorted(path for path in (root / "c4").rglob("*") if path.is_file() and is_text_file(path))
    validation = [path for path in there if "validation" in path.name]
    if use == "calibration":
        return [path for path in there if path not in validation], ()
    if validation:
        return validation, ()
    note = f"'{root / 'c4'}' has no c4-validation file: perplexity is of the documents that are there"
    return there, (note,) if there else ()


def _builtin(use: Use) -> Texts:
    documents = builtin_documents(held_out=use == "evaluation")
    split = "test" if use == "evaluation" else "train"
    return Texts(name="builtin", split=split, origin=builtin_origin(), documents=documents)


# -- files and folders -------------------------------------------------------------------------------------------------


def _path(name: str, use: Use) -> Texts:
    path = Path(os.path.expanduser(name))
    if path.is_dir():
        known = _wikitext_folder(path, use)
        if known is not None:
            return known
        files = sorted(each for each in path.iterdir() if each.is_file() and is_text_file(each))
        if not files:
            raise InputError(f"--dataset {name!r}: no text, .jsonl, .json or .parquet file in that folder")
    elif path.exists():
        files = [path]
    else:
        raise UnknownName("data set or file", name, NAMES, more=f"--dataset takes {', '.join(NAMES)} or a path")
    documents = [document for each in files for document in read_documents(each)]
    return Texts(name=name, split="all", origin=str(path), documents=documents)


def _data_folder() -> Path | None:
    said = os.environ.get(VARIABLE, "")
    if not said:
        return None
    folder = Path(os.path.expanduser(said))
    if not folder.is_dir():
        raise InputError(f"{VARIABLE} is {said!r}, which is not a folder")
    return folder


def _near(root: Path) -> list[Path]:
    """The folder itself, then those in it that are called after the set."""
    return [root, *sorted(each for each in root.iterdir() if each.is_dir() and each.name.startswith("wikitext"))]


# -- the Hub -----------------------------------------------------------------------------------------------------------

_HOW = (
    f"--dataset builtin needs nothing, a text file of your own works too; or set {VARIABLE} to a folder with\n"
    "wikitext-2-raw/wiki.train.raw or c4/*.jsonl"
)


def _from_hub(name: str, repos: Sequence[str], file: str) -> list[str]:
    if file.endswith(".parquet"):
        _check_parquet(name)
    cached = (found for repo in repos if (found := find_cached(repo, file)) is not None)
    try:
        return read_documents(next(cached, None) or fetch_file(repos[0], file))
    except InputError as error:
        raise InputError(f"no text for --dataset {name}: {_looked()}, and {error.message}", hint=_HOW) from error


def _is_cached(repos: Sequence[str], file: str) -> bool:
    return any(find_cached(repo, file) is not None for repo in repos)


def _check_parquet(name: str) -> None:
    if find_spec("pyarrow") is None:
        raise InputError(
            f"no text for --dataset {name}: {_looked()}, and on the Hub it is Parquet, which needs the package pyarrow",
            hint=f"{PARQUET_HINT}; {_HOW}",
        )


def _looked() -> str:
    said = os.environ.get(VARIABLE)
    return f"not in {VARIABLE}={said!r}" if said else f"{VARIABLE} is not set"
