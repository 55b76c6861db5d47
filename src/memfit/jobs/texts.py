"""`--dataset`: where text for calibration and perplexity comes from: this machine, or the Hugging Face Hub.

    wikitext2   WikiText-2 raw, train for calibration and test for perplexity
    c4          C4, one document at a time
    builtin     the reference that Python itself carries, English on every machine; every fourth topic is kept for tests
    PATH        a text file, .jsonl or .json with "text" in each row, .parquet, also .gz; or a folder of these

A named set is looked for in the folder that MEMFIT_DATA names (`wikitext-2-raw/wiki.{train,valid,test}.raw`,
`c4/*.jsonl`), then in the cache of the Hugging Face Hub, then on the Hub. WikiText-2 is a Parquet file there, which the
extra memfit[data] reads; C4 is compressed JSON, which needs nothing.

A data set of the Hub comes file by file: from its cache, else fetched by `huggingface_hub`. Which files make up a split
is what the set's own page says (`configs` in its README), else what their names say, as on the Hub. Files are read as
they would be from this disk; a set that consists of something else is refused.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from memfit.errors import InputError, UnknownName
from memfit.jobs.text_files import (
    PARQUET_HINT,
    PLAIN,
    builtin_documents,
    builtin_origin,
    is_text_file,
    kind_of,
    lines_of,
    read_documents,
)
from memfit.models.files import first_line, why_no_hub

NOT_DATA = ("readme", "license", "dataset_info", "notice", ".")
SAME_SPLIT = (("train", "training"), ("validation", "valid", "val", "dev"), ("test", "testing", "eval", "evaluation"))


def find_cached(repo: str, name: str) -> Path | None:
    """A file of a data set as it lies in the cache; nothing is fetched."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(repo, name, repo_type="dataset")
    return Path(found) if isinstance(found, str) else None


def fetch_file(repo: str, name: str) -> Path:
    """A file of a data set, from the cache or the Hub."""
    from huggingface_hub import hf_hub_download

    if (found := find_cached(repo, name)) is not None:
        return found
    _check_reach(f"'{name}' of {repo}")
    try:
        return Path(hf_hub_download(repo, name, repo_type="dataset"))
    except Exception as error:  # what it raises depends on its version and on what went wrong
        raise InputError(f"the Hub does not give '{name}' of {repo}: {first_line(error)}") from error


def find_split(repo: str, subset: str | None, split: str) -> list[str]:
    """The names of the files that make up a split of a data set."""
    files = sorted(_list_files(repo))
    if configs := _configs(repo, files):
        named = list(_files_of_split(_chosen(configs, repo, subset), files, split))
    else:
        named = _by_name(_in_folder(files, repo, subset), split)
    if not named:
        raise InputError(f"{repo} has no split '{split}' that is known by the names of its files: {_some(files)}")
    for name in (name for name in named if not is_text_file(Path(name))):
        raise InputError(f"memfit reads no files such as '{name}', of which {repo} consists")
    return named


def _check_reach(what: str) -> None:
    if (why := why_no_hub()) is not None:
        raise InputError(f"{what} is not in the Hugging Face cache, and {why}")


def _list_files(repo: str) -> list[str]:
    """Of the Hub, or of the cache where the Hub is out of reach."""
    from huggingface_hub import HfApi, snapshot_download

    if why_no_hub() is None:
        try:
            return list(HfApi().list_repo_files(repo, repo_type="dataset"))
        except Exception as error:
            raise InputError(f"the Hub does not give {repo}: {first_line(error)}") from error
    try:
        folder = Path(snapshot_download(repo, repo_type="dataset", local_files_only=True))
    except Exception:
        _check_reach(repo)
        raise
    return [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]


# -- what the page says ------------------------------------------------------------------------------------------------


def _configs(repo: str, files: Sequence[str]) -> list[Mapping[str, Any]]:
    if "README.md" not in files:
        return []
    from huggingface_hub import metadata_load

    try:
        said = metadata_load(fetch_file(repo, "README.md")) or {}
    except ValueError:  # what YAML cannot read says nothing
        return []
    configs = said.get("configs")
    configs = configs if isinstance(configs, list) else []
    return [each for each in configs if isinstance(each, dict) and "data_files" in each]


def _chosen(configs: Sequence[Mapping[str, Any]], repo: str, subset: str | None) -> Mapping[str, Any]:
    names = [str(each.get("config_name", "default")) for each in configs]
    if subset is not None:
        if subset not in names:
            raise InputError(f"{repo} has no subset '{subset}'; it has {', '.join(map(repr, names[:12]))}")
        return configs[names.index(subset)]
    usual = [each for each, name in zip(configs, names, strict=True) if each.get("default") or name == "default"]
    if len(configs) > 1 and not usual:
        raise InputError(f"{repo} has several subsets, and none was named: {', '.join(map(repr, names[:12]))}")
    return (usual or list(configs))[0]


def _files_of_split(config: Mapping[str, Any], files: Sequence[str], split: str) -> Iterator[str]:
    """`data_files` is a pattern, several, or a list of splits with theirs; without a split it is train."""
    said = config["data_files"]
    for entry in said if isinstance(said, list) else [said]:
        entry = entry if isinstance(entry, dict) else {"split": "train", "path": entry}
        if entry.get("split", "train") == split:
            paths = entry.get("path", ())
            for pattern in [paths] if isinstance(paths, str) else paths:
                yield from (name for name in files if fnmatch(name, str(pattern)))


# -- what the names say ------------------------------------------------------------------------------------------------


def _in_folder(files: Sequence[str], repo: str, subset: str | None) -> list[str]:
    data = [name for name in files if not Path(name).name.lower().startswith(NOT_DATA)]
    structured = [name for name in data if is_text_file(Path(name)) and kind_of(Path(name)) not in PLAIN]
    data = structured or data
    if subset is None:
        return data
    inside = [name for name in data if subset in Path(name).parts[:-1]]
    if not inside:
        raise InputError(f"{repo} has no folder '{subset}', the subset asked for; it has {_some(files)}")
    return inside


def _by_name(files: Sequence[str], split: str) -> list[str]:
    found = {names[0]: _with_word(files, names) for names in SAME_SPLIT}
    asked = next((names[0] for names in SAME_SPLIT if split in names), None)
    named = found[asked] if asked is not None else _with_word(files, (split,))
    if not named and asked == "train" and not any(found.values()):
        return list(files)  # no name speaks of a split: all of it is there to learn from
    return named


def _with_word(files: Sequence[str], words: Sequence[str]) -> list[str]:
    word = re.compile(rf"(^|[/._ -])({'|'.join(map(re.escape, words))})([/._ 0-9-]|$)")
    return [name for name in files if word.search(name)]


def _some(files: Sequence[str]) -> str:
    return ", ".join(f"'{name}'" for name in files[:8]) + (f" and {len(files) - 8} more" if len(files) > 8 else "")


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
    if (local := _local_wikitext(use)) is not None:
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
    near = sorted(each for each in root.iterdir() if each.is_dir() and each.name.startswith("wikitext"))
    return next((found for each in (root, *near) if (found := _wikitext_folder(each, use)) is not None), None)


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
