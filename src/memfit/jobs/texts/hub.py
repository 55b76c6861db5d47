"""Data sets of the Hugging Face Hub, file by file: from its cache, else fetched by `huggingface_hub`.

Which files make up a split is what the set's own page says (`configs` in its README), else what their names say, as on
the Hub. Files are read as they would be from this disk; a set that consists of something else is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from memfit.errors import InputError
from memfit.jobs.texts.files import PLAIN, is_text_file, kind_of
from memfit.models.checkpoint import first_line, why_no_hub

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

    found = find_cached(repo, name)
    if found is not None:
        return found
    _check_reach(f"'{name}' of {repo}")
    try:
        return Path(hf_hub_download(repo, name, repo_type="dataset"))
    except Exception as error:  # what it raises depends on its version and on what went wrong
        raise InputError(f"the Hub does not give '{name}' of {repo}: {first_line(error)}") from error


def find_split(repo: str, subset: str | None, split: str) -> list[str]:
    """The names of the files that make up a split of a data set."""
    files = sorted(_list_files(repo))
    configs = _configs(repo, files)
    if configs:
        named = list(_files_of_split(_chosen(configs, repo, subset), files, split))
    else:
        named = _by_name(_in_folder(files, repo, subset), split)
    if not named:
        raise InputError(f"{repo} has no split '{split}' that is known by the names of its files: {_some(files)}")
    unread = [name for name in named if not is_text_file(Path(name))]
    if unread:
        raise InputError(f"memfit reads no files such as '{unread[0]}', of which {repo} consists")
    return named


def _check_reach(what: str) -> None:
    why = why_no_hub()
    if why is not None:
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
