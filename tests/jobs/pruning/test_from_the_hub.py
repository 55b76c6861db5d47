"""Model and text from the Hub, as on a fresh install: nothing but memfit's own dependencies, and a Hub on loopback."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from local_hub import LocalHub, put_into_cache, serving
from tiny_folder import english, model_folder

from memfit.errors import InputError
from memfit.jobs.texts import WIKITEXT_FILES, fetch_file, find_split, find_texts, is_on_this_machine

SHARED = Path(__file__).parents[3].parent / "shared" / "data"
MODEL = "meta-llama/Llama-3.2-1B"
WANDA = f"--model {MODEL} --prune_method wanda --sparsity_ratio 0.5 --sparsity_type unstructured"
DEBUGGING_GUIDE = [
    f"{WANDA} --save out/llama_3.2_1b/unstructured/wanda/",
    f"{WANDA} --seqlen 2048 --save out/llama_3.2_1b/unstructured/wanda/",
    f"{WANDA} --seqlen 2048 --save out/llama_3.2_1b/unstructured/wanda/ --log_memory",
    f"{WANDA} --seqlen 2048 --save out/test/ --log_memory",
    f"{WANDA} --seqlen 2048 --nsamples 128 --dataset wikitext2 --save out/test/ --log_memory",
]
ESTIMATION_GUIDE = [
    f"{WANDA} --dataset wikitext2 --nsamples 128 --seqlen 2048",
    f"{WANDA} --dataset wikitext2 --nsamples 64 --seqlen 1024",
    f"--model {MODEL} --sparsity_ratio 0.5 --dataset wikitext2",
    f"--model {MODEL} --seqlen 512 --nsamples 32 --dataset c4",
]
BARE = ("datasets", "pyarrow", "pyarrow.parquet")
REFUSED = {
    f"--model {MODEL} --dataset no-such-file.txt": "no data set or file called 'no-such-file.txt'",
    f"--model {MODEL} --dataset c4 --seqlen 64 --eval --eval-dataset c4": "en/c4-validation.00000-of-00008",
    "--model meta-llama/Llama-9B --dataset builtin": "'meta-llama/Llama-9B' is not in the Hugging Face cache",
    "--model org/huge --dataset builtin": "needs 8.00 TiB; its disk has",
}
"""The size is what the Hub says; the disk is this one, which has no room for it."""
GROUPS: dict[str, tuple[tuple[str, ...], list[str]]] = {
    "refused without Parquet": (BARE, DEBUGGING_GUIDE[:1]),
    "without Parquet": (
        BARE,
        [f"{WANDA} --dataset builtin --nsamples 2 --no-eval", f"{WANDA} --dataset c4 --nsamples 2 --seqlen 32"],
    ),
    "refused": (("datasets",), [f"{line} --save out/x" for line in REFUSED]),
    "guides": (("datasets",), [*DEBUGGING_GUIDE, *ESTIMATION_GUIDE]),
}
"""What is as where it is not installed, and commands of `memfit prune`; each group in an empty folder with an empty
cache, all in one process, for its imports take longer than all of them."""
IN_ORDER = """
import json, os, shutil, sys, urllib.request
from pathlib import Path
from memfit.cli.main import main
for group, (without, lines) in json.loads(sys.argv[1]).items():
    sys.modules |= {name: None for name in without}
    shutil.rmtree(os.environ["HF_HOME"], ignore_errors=True)
    urllib.request.urlopen(f"{os.environ['HF_ENDPOINT']}/groups/all/resolve/main/{group.replace(' ', '-')}")
    folder = Path(sys.argv[2], group)
    folder.mkdir()
    os.chdir(folder)
    for stream in (sys.stdout, sys.stderr):
        print("GROUP", file=stream, flush=True)
    for line in lines:
        print("EXIT", main(["prune", *line.split()]), flush=True)
    for name in without:
        del sys.modules[name]
"""


@dataclass(frozen=True)
class Ended:
    folder: Path
    stdout: str
    stderr: str
    asked: list[str]
    """Of the Hub."""

    @property
    def codes(self) -> list[str]:
        return [line.removeprefix("EXIT ") for line in self.stdout.splitlines() if line.startswith("EXIT ")]

    @property
    def weights(self) -> list[str]:
        return [name for name in self.asked if "safetensors" in name]


def parquet_of(rows: list[str]) -> bytes:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    made = io.BytesIO()
    parquet.write_table(pyarrow.table({"text": rows}), made)
    return made.getvalue()


def json_gz_of(rows: list[str]) -> bytes:
    return gzip.compress("".join(json.dumps({"text": row, "url": "x"}) + "\n" for row in rows).encode())


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalHub]:
    where = tmp_path_factory.mktemp("hub")
    folder = model_folder(where, max_position_embeddings=64)
    with serving(where / "files") as served:
        for path in folder.iterdir():
            served.put("models", MODEL, path.name, path.read_bytes())
        for use, words in (("calibration", 120), ("evaluation", 20)):
            rows = [f"{line}. \n" for line in english(words).split(".")]
            served.put("datasets", "Salesforce/wikitext", WIKITEXT_FILES[use], parquet_of(rows))  # type: ignore[index]
        served.put("datasets", "allenai/c4", "en/c4-train.00000-of-01024.json.gz", json_gz_of([english(60), "short"]))
        for path in folder.iterdir():
            served.put("models", "org/huge", path.name, path.read_bytes())
        with (where / "files" / "models" / "org" / "huge" / "model-00002-of-00002.safetensors").open("wb") as file:
            file.truncate(1 << 43)  # a file with a hole of 8 TiB
        for group in GROUPS:
            served.put("models", "groups/all", group.replace(" ", "-"), b"begins")
        yield served


@pytest.fixture(scope="module")
def ended(hub: LocalHub, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    where = tmp_path_factory.mktemp("ended")
    known = {name: value for name, value in os.environ.items() if name != "MEMFIT_DATA"}
    done = subprocess.run(
        [sys.executable, "-c", IN_ORDER, json.dumps(GROUPS), str(where)], capture_output=True, text=True, timeout=300,
        check=True, env={**known, "HF_ENDPOINT": hub.endpoint, "HF_HOME": str(where / "hf"), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    said = [stream.split("GROUP\n")[1:] for stream in (done.stdout, done.stderr)]
    begun = [hub.asked.index(f"groups/all/{group.replace(' ', '-')}") for group in GROUPS]
    asked = [hub.asked[start:end] for start, end in zip(begun, [*begun[1:], None], strict=True)]
    return {name: Ended(where / name, *each) for name, *each in zip(GROUPS, *said, asked, strict=True)}


def test_the_guides_commands_run_in_order_as_they_are_written(ended: dict[str, Ended]) -> None:
    guides = ended["guides"]
    assert guides.codes == ["0"] * 9, guides.stderr
    assert guides.stderr.count("holds the result of this very run: it is replaced when this one is whole") == 3
    assert sorted(path.name for path in (guides.folder / "out").iterdir()) == ["llama_3.2_1b", "test"]
    saved = guides.folder / "out" / "llama_3.2_1b" / "unstructured"
    assert [path.name for path in saved.iterdir()] == ["wanda"]
    assert (saved / "wanda" / "memory_log.csv").is_file(), "of the third command, which asked for it"
    assert (guides.folder / "out" / "test" / "memory_log.csv").is_file(), "of the fourth, into a folder of its own"
    assert "wikitext perplexity" in guides.stdout
    assert "loading calibration data" in guides.stdout
    assert guides.weights == [f"{MODEL}/model.safetensors"], "once; the other runs have it from the cache"


def test_without_the_reader_of_parquet_nothing_of_the_weights_is_fetched_and_the_ways_out_are_named(
    ended: dict[str, Ended],
) -> None:
    refused = ended["refused without Parquet"]
    assert refused.codes == ["2"], refused.stderr
    assert "no text for --dataset wikitext2: MEMFIT_DATA is not set, and on the Hub it is Parquet" in refused.stderr
    assert "pip install 'memfit[data]' brings it; --dataset builtin needs nothing" in refused.stderr
    assert not (refused.folder / "out").exists(), "not even an empty folder is left"
    assert f"{MODEL}/config.json" in refused.asked and refused.weights == []
    assert ended["without Parquet"].codes == ["0", "0"], ended["without Parquet"].stderr


def test_what_is_missing_or_has_no_room_is_found_before_a_byte_of_the_weights_is_fetched(
    ended: dict[str, Ended],
) -> None:
    refused = ended["refused"]
    assert refused.codes == ["2"] * 4, refused.stderr
    assert [said for said in REFUSED.values() if said not in refused.stderr] == []
    assert refused.weights == []


# -- the cache ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place there is: no folder of data, no network."""
    monkeypatch.delenv("MEMFIT_DATA", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path / "cache"


@pytest.mark.parametrize("repo", ["Salesforce/wikitext", "wikitext"])
def test_what_lies_in_the_cache_needs_no_network(cache: Path, repo: str) -> None:
    assert not is_on_this_machine("wikitext2")
    put_into_cache(cache, "datasets", repo, WIKITEXT_FILES["calibration"], parquet_of([" = A = \n", "", " words \n"]))
    assert is_on_this_machine("wikitext2")
    assert find_texts("wikitext2", "calibration").documents == [" = A = \n", "", " words \n"]


def test_offline_the_error_says_so_and_what_needs_nothing(cache: Path) -> None:
    with pytest.raises(InputError, match="is not in the Hugging Face cache, and HF_HUB_OFFLINE is set") as caught:
        find_texts("c4", "calibration")
    assert "--dataset builtin needs nothing" in str(caught.value.hint)


@pytest.mark.skipif(not SHARED.is_dir(), reason=f"no data in {SHARED}")
def test_the_rows_of_the_hub_are_the_published_text(cache: Path) -> None:
    """The file on the Hub has the lines of the published one as its rows, blank ones empty."""
    raw = (SHARED / "wikitext-2-raw" / "wiki.test.raw").read_text(encoding="utf-8").splitlines(keepends=True)
    rows = [line if line.strip() else "" for line in raw]
    put_into_cache(cache, "datasets", "Salesforce/wikitext", WIKITEXT_FILES["evaluation"], parquet_of(rows))
    digest = hashlib.sha256(find_texts("wikitext2", "evaluation").joined().encode()).hexdigest()
    assert digest == "696cca6b65a171b0a358a4be6732cdfdf2dd6164a32e20fd70e3c13fc4dfae83"


@pytest.mark.skipif(not SHARED.is_dir(), reason=f"no data in {SHARED}")
def test_c4_as_the_hub_has_it_is_read_without_pyarrow(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    rows = (SHARED / "c4" / "c4_demo.jsonl").read_bytes()
    put_into_cache(cache, "datasets", "allenai/c4", "en/c4-train.00000-of-01024.json.gz", gzip.compress(rows))
    found = find_texts("c4", "calibration")
    assert (len(found.documents), found.by_document) == (300, True)


# -- any data set ------------------------------------------------------------------------------------------------------

PAGE = b"""---
configs:
- config_name: large
  data_files: large/*.jsonl
- config_name: small
  default: true
  data_files:
  - split: train
    path: [small/a.jsonl, small/b.jsonl]
  - split: test
    path: small/held-out.jsonl
---
# A set
"""


def put_set(cache: Path, *names: str, page: bytes | None = None) -> None:
    for name in names:
        put_into_cache(cache, "datasets", "org/set", name, name.encode())
    if page is not None:
        put_into_cache(cache, "datasets", "org/set", "README.md", page)


def test_the_files_of_a_split_are_those_that_the_sets_page_names(cache: Path) -> None:
    put_set(cache, "small/a.jsonl", "small/b.jsonl", "small/held-out.jsonl", "large/train.jsonl", page=PAGE)
    assert find_split("org/set", None, "train") == ["small/a.jsonl", "small/b.jsonl"]
    assert find_split("org/set", "small", "test") == ["small/held-out.jsonl"]
    assert find_split("org/set", "large", "train") == ["large/train.jsonl"]
    with pytest.raises(InputError, match="no subset 'medium'; it has 'large', 'small'"):
        find_split("org/set", "medium", "train")
    with pytest.raises(InputError, match="has no split 'dev'"):
        find_split("org/set", "small", "dev")


@pytest.mark.parametrize(
    ("names", "asked", "found"),
    [
        (("data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet", "data/test-0.parquet"),
         (None, "train"), ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"]),
        (("data/train-0.parquet", "data/dev.parquet"), (None, "validation"), ["data/dev.parquet"]),
        (("alpaca_data.json", "README.md", "dataset_info.json"), (None, "train"), ["alpaca_data.json"]),
        (("de/train.jsonl", "en/train.jsonl"), ("en", "train"), ["en/train.jsonl"]),
        (("train.txt", "LICENSE.txt"), (None, "train"), ["train.txt"]),
    ],
)  # fmt: skip
def test_without_a_page_the_names_of_the_files_say_what_they_are(
    cache: Path, names: tuple[str, ...], asked: tuple[str | None, str], found: list[str]
) -> None:
    put_set(cache, *names)
    assert find_split("org/set", *asked) == found


@pytest.mark.parametrize(
    ("names", "asked", "said"),
    [
        (("train.csv",), (None, "train"), "memfit reads no files such as 'train.csv', of which org/set consists"),
        (("train.jsonl",), (None, "test"), "has no split 'test' that is known by the names of its files"),
        (("train.jsonl",), ("en", "train"), "has no folder 'en', the subset asked for"),
    ],
)
def test_a_set_that_memfit_cannot_read_is_said_to_be_that(
    cache: Path, names: tuple[str, ...], asked: tuple[str | None, str], said: str
) -> None:
    put_set(cache, *names)
    with pytest.raises(InputError, match=said):
        find_split("org/set", *asked)


def test_a_set_that_is_nowhere_is_said_to_be_out_of_reach(cache: Path) -> None:
    with pytest.raises(InputError, match="org/set is not in the Hugging Face cache, and HF_HUB_OFFLINE is set"):
        find_split("org/set", None, "train")
    with pytest.raises(InputError, match=r"'a\.jsonl' of org/set is not in the Hugging Face cache"):
        fetch_file("org/set", "a.jsonl")
