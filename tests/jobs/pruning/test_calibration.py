"""Calibration windows are those of the published code; what cannot give any is refused at once."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_folder import byte_tokenizer, english

from memfit.errors import InputError, UnknownName
from memfit.jobs.pruning.calibration import Windows, calibration_windows
from memfit.jobs.texts import find_texts

SHARED = Path(__file__).parents[3].parent / "shared" / "data"
with_shared_data = pytest.mark.skipif(not SHARED.is_dir(), reason="the folder ../shared/data is not here")


@pytest.fixture(autouse=True)
def no_data_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEMFIT_DATA", raising=False)


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    monkeypatch.setenv("MEMFIT_DATA", str(folder))
    return folder


def wikitext(data: Path, split: str, text: str) -> None:
    (data / "wikitext-2-raw").mkdir(exist_ok=True)
    (data / "wikitext-2-raw" / f"wiki.{split}.raw").write_text(text, newline="")


def c4(data: Path, *documents: str) -> None:
    (data / "c4").mkdir(exist_ok=True)
    rows = "".join(json.dumps({"text": document, "url": "-"}) + "\n" for document in documents)
    (data / "c4" / "part.jsonl").write_text(rows)


def text_of(window: torch.Tensor) -> str:
    return str(byte_tokenizer().decode(window.tolist()))


# -- which windows -----------------------------------------------------------------------------------------------------


def drawn(name: str, *how: Any, **more: Any) -> Windows:
    return calibration_windows(find_texts(name, "calibration"), *how, **more)


def test_running_text_is_sampled_as_the_published_code_does(data: Path) -> None:
    text = english(300)
    wikitext(data, "train", text)
    made = drawn("wikitext2", byte_tokenizer(), nsamples=5, seqlen=16, seed=7)

    random.seed(7)
    starts = [random.randint(0, len(text) - 16 - 1) for _ in range(5)]
    assert [text_of(window) for window in made.ids] == [text[start : start + 16] for start in starts]
    assert (made.ids.shape, made.ids.dtype) == ((5, 16), torch.int64)


def test_documents_are_drawn_until_one_is_longer_than_the_window(data: Path) -> None:
    documents = [english(20)[i : i + 5 * (1 + i % 9)] for i in range(60)]
    c4(data, *documents)
    made = drawn("c4", byte_tokenizer(), nsamples=8, seqlen=20, seed=3)

    random.seed(3)
    expected = []
    for _ in range(8):
        while True:
            document = documents[random.randint(0, len(documents) - 1)]
            if len(document) > 20:
                break
        start = random.randint(0, len(document) - 20 - 1)
        expected.append(document[start : start + 20])
    assert [text_of(window) for window in made.ids] == expected


def test_a_document_exactly_as_long_as_the_window_is_too_short(data: Path) -> None:
    c4(data, "a" * 20, "b" * 21)
    made = drawn("c4", byte_tokenizer(), nsamples=4, seqlen=20, seed=0)
    assert {text_of(window) for window in made.ids} == {"b" * 20}
    assert made.notes == ("the 4 windows come from only 1 documents that are longer than 20 tokens",)


def test_the_seed_alone_decides_and_other_random_numbers_do_not_matter(data: Path) -> None:
    wikitext(data, "train", english(300))
    first = drawn("wikitext2", byte_tokenizer(), 4, 16, seed=1)
    random.random()
    again = drawn("wikitext2", byte_tokenizer(), 4, 16, seed=1)
    other = drawn("wikitext2", byte_tokenizer(), 4, 16, seed=2)
    assert first.fingerprint == again.fingerprint
    assert first.fingerprint.sha256 != other.fingerprint.sha256


def test_the_begin_token_stands_once_before_the_whole_text(data: Path) -> None:
    wikitext(data, "train", "abcdefgh")
    made = drawn("wikitext2", byte_tokenizer(begin=True), nsamples=20, seqlen=7, seed=0)
    assert {text_of(window) for window in made.ids} == {"<s>abcdef", "abcdefg"}


def test_rows_of_wikitext_are_joined_as_the_hub_has_them(data: Path) -> None:
    wikitext(data, "train", " = Title = \n \n Some text . \n")
    assert find_texts("wikitext2", "calibration").joined() == " = Title = \n   Some text . \n"
    wikitext(data, "test", " = Title = \n \n Some text . \n")
    assert find_texts("wikitext2", "evaluation").joined() == " = Title = \n\n\n\n\n Some text . \n"


# -- fingerprint -------------------------------------------------------------------------------------------------------


def test_the_fingerprint_is_the_hash_of_the_token_ids(data: Path) -> None:
    wikitext(data, "train", english(50))
    made = drawn("wikitext2", byte_tokenizer(), nsamples=2, seqlen=8, seed=0)
    flat = [token for window in made.ids.tolist() for token in window]
    expected = hashlib.sha256(b"".join(token.to_bytes(8, "little") for token in flat)).hexdigest()
    assert made.fingerprint.sha256 == expected
    described = asdict(made.fingerprint)
    assert (described["dataset"], described["split"], described["windows"], described["seqlen"]) == (
        "wikitext2", "train", 2, 8,
    )  # fmt: skip
    assert described["text_tokens"] == len(english(50))
    assert described["tokenizers"][0].isdigit()


# -- where text comes from ---------------------------------------------------------------------------------------------


def test_without_the_train_split_the_validation_split_is_used_and_said(data: Path) -> None:
    wikitext(data, "valid", english(50))
    made = drawn("wikitext2", byte_tokenizer(), nsamples=2, seqlen=8, seed=0)
    assert made.fingerprint.split == "valid"
    assert "calibrated on its validation split" in made.notes[0]


def test_the_test_split_is_never_calibrated_on(data: Path) -> None:
    wikitext(data, "test", english(50))
    with pytest.raises(InputError, match="no text for --dataset wikitext2"):
        find_texts("wikitext2", "calibration")
    with pytest.raises(InputError, match=r"no text, \.jsonl"):
        find_texts(str(data), "calibration")


def test_a_folder_that_holds_wikitext_is_known_as_such(data: Path) -> None:
    wikitext(data, "valid", "valid text")
    wikitext(data, "test", "test text")
    found = find_texts(str(data / "wikitext-2-raw"), "calibration")
    assert (found.name, found.joined()) == ("wikitext2", "valid text")


def test_the_built_in_text_is_on_every_machine_and_its_tests_are_held_back() -> None:
    calibration, evaluation = find_texts("builtin", "calibration"), find_texts("builtin", "evaluation")
    assert len(calibration.joined()) > 200_000
    assert len(evaluation.joined()) > 60_000
    assert not set(calibration.joined().split("\n\n")) & set(evaluation.joined().split("\n\n"))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.txt", "one two\nthree"),
        ("a.jsonl", '{"text": "one two"}\n\n{"text": "three"}\n'),
        ("a.json", '[{"text": "one two"}, {"text": "three"}]'),
        ("b.json", '{"text": "one two", "url": "-"}\n{"text": "three", "url": "-"}\n'),
        ("c.json", '["one two", "three"]'),
        ("d.json", '{"text": ["one two", "three"]}'),
    ],
)
def test_a_file_of_text_is_read(tmp_path: Path, name: str, content: str) -> None:
    path = tmp_path / name
    path.write_text(content)
    compressed = tmp_path / f"{name}.gz"
    compressed.write_bytes(gzip.compress(content.encode()))
    for each in (path, compressed):
        assert find_texts(str(each), "calibration").joined().split() == ["one", "two", "three"]


def test_a_folder_is_all_its_text_files_in_order(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.jsonl").write_text('{"text": "first"}\n')
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    assert find_texts(str(tmp_path), "calibration").joined() == "first second"


def test_parquet_is_read_where_pyarrow_is(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"text": ["one", "two"]}), tmp_path / "a.parquet")
    assert find_texts(str(tmp_path / "a.parquet"), "calibration").joined() == "one two"


def test_a_line_separator_of_unicode_is_part_of_the_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one\u2028two"}\n', encoding="utf-8")
    assert find_texts(str(tmp_path / "a.jsonl"), "calibration").documents == ["one\u2028two"]


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_a_text_too_short_for_one_window_says_how_many_tokens_it_has(data: Path) -> None:
    wikitext(data, "train", "x" * 16)
    with pytest.raises(InputError, match="has only 16 tokens; --seqlen 16 needs at least 17"):
        drawn("wikitext2", byte_tokenizer(), nsamples=1, seqlen=16, seed=0)
    wikitext(data, "train", "x" * 17)
    assert len(drawn("wikitext2", byte_tokenizer(), nsamples=1, seqlen=16, seed=0).ids) == 1


def test_documents_that_are_all_too_short_are_an_error_and_not_an_endless_loop(data: Path) -> None:
    c4(data, "short", "not so short", "tiny")
    with pytest.raises(InputError, match="the longest of 3 documents has 12 tokens"):
        drawn("c4", byte_tokenizer(), nsamples=1, seqlen=2048, seed=0)


@pytest.mark.parametrize("content", ["", "  \n \n"])
def test_an_empty_file_is_told(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.txt").write_text(content)
    with pytest.raises(InputError, match="holds no text"):
        find_texts(str(tmp_path / "a.txt"), "calibration")


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("a.jsonl", b'{"text": "one"}\n{"txt": "two"}', r"line 2: no 'text' in it; it has 'txt'"),
        ("a.jsonl", b"{oops", "line 1: not JSON"),
        ("a.json", b"[1, 2]", "row 1: no 'text' in it"),
        ("a.txt", b"\xff\xfe", "is not UTF-8 text"),
        ("a.txt.gz", b"not gzip", "cannot read .* gzip"),
        ("a.jsonl", b"[" * 100_000, "not JSON"),
    ],
)
def test_a_damaged_file_is_told(tmp_path: Path, name: str, content: bytes, why: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=why):
        find_texts(str(tmp_path / name), "calibration")


def test_a_misspelt_name_is_told_with_the_nearest() -> None:
    with pytest.raises(UnknownName, match="no data set or file called 'wikitext'") as caught:
        find_texts("wikitext", "calibration")
    assert "did you mean 'wikitext2'?" in str(caught.value.hint)


def test_a_data_folder_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMFIT_DATA", "/nowhere/at/all")
    with pytest.raises(InputError, match="MEMFIT_DATA is '/nowhere/at/all', which is not a folder"):
        find_texts("wikitext2", "calibration")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("secret")
    (tmp_path / "a.txt").chmod(0)
    with pytest.raises(InputError, match="cannot read"):
        find_texts(str(tmp_path / "a.txt"), "calibration")


# -- the real text -----------------------------------------------------------------------------------------------------


@with_shared_data
def test_the_joined_test_text_is_the_published_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMFIT_DATA", str(SHARED))
    text = find_texts("wikitext2", "evaluation").joined()
    assert len(text.encode()) == 1_296_370
    digest = hashlib.sha256(text.encode()).hexdigest()
    assert digest == "696cca6b65a171b0a358a4be6732cdfdf2dd6164a32e20fd70e3c13fc4dfae83"


@with_shared_data
def test_the_shared_folder_has_c4_and_the_validation_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMFIT_DATA", str(SHARED))
    assert len(find_texts("c4", "calibration").documents) == 300
    assert find_texts("wikitext2", "calibration").split == "valid"
