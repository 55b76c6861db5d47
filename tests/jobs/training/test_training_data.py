"""What a sample is, what of it is learned, and that nothing is lost unseen."""

from __future__ import annotations

import gzip
import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from local_hub import put_into_cache
from training_folder import ALPACA, alpaca_file, text_file

from memfit.errors import InputError, UsageError
from memfit.jobs import text_files as files
from memfit.jobs.training.chunked_loss import IGNORED
from memfit.jobs.training.config import DataConfig, ScheduleConfig
from memfit.jobs.training.data import (
    Collator,
    TrainingData,
    epoch_order,
    read_training_data,
    rows_of_step,
    total_steps,
)
from memfit.jobs.training.examples import ByteTokenizer

SHARED = Path(__file__).parents[3].parent / "shared" / "data"
END = ByteTokenizer.eos_token_id


def read(source: str, **settings: Any) -> TrainingData:
    return read_training_data(DataConfig(source=source, **settings), ByteTokenizer())


def text_of(ids: torch.Tensor) -> str:
    return ByteTokenizer().decode(ids.tolist())


def learned(sample: dict[str, torch.Tensor]) -> str:
    return text_of(sample["labels"][sample["labels"] != IGNORED])


# -- samples -----------------------------------------------------------------------------------------------------------


def test_text_is_packed_into_full_samples_with_an_end_after_each_document(tmp_path: Path) -> None:
    path = tmp_path / "two.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("abcde", "fg")))
    data = read(str(path), max_seq_len=4)
    assert [data[i]["input_ids"].tolist() for i in range(len(data))] == [[97, 98, 99, 100], [101, END, 102, 103]]
    assert torch.equal(data[0]["labels"], data[0]["input_ids"])
    assert (data.summary.tokens, data.summary.tokens_left_out) == (8, 1)


def test_of_an_instruction_only_the_answer_is_learned(tmp_path: Path) -> None:
    data = read(alpaca_file(tmp_path))
    assert not data.packed
    assert [learned(data[i]) for i in range(3)] == ["3", "Hello!", "1 2 3 4 5"]
    assert "### Instruction:\nAdd.\n\n### Input:\n1 and 2\n\n### Response:\n3" in text_of(data[0]["input_ids"])
    assert "### Input" not in text_of(data[1]["input_ids"])
    assert data[0]["labels"][-1] == END


def test_the_prompt_is_learned_too_if_asked_for(tmp_path: Path) -> None:
    data = read(alpaca_file(tmp_path), mask_prompt=False)
    assert torch.equal(data[0]["labels"], data[0]["input_ids"])


def test_prompt_and_completion_are_used_as_they_stand(tmp_path: Path) -> None:
    data = read(alpaca_file(tmp_path, [{"prompt": "2+2=", "completion": "4"}]))
    assert (text_of(data[0]["input_ids"]), learned(data[0])) == ("2+2=4", "4")


def test_instructions_can_be_packed_and_prompts_stay_masked(tmp_path: Path) -> None:
    data = read(alpaca_file(tmp_path), packing=True, max_seq_len=32)
    assert data.packed
    assert set(data.lengths.tolist()) == {32}
    assert "Hello!" in "".join(learned(data[i]) for i in range(len(data)))
    assert "Instruction" not in "".join(learned(data[i]) for i in range(len(data)))


def test_a_folder_is_read_file_by_file_in_order(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.txt").write_text("first")
    data = read(str(tmp_path), packing=False)
    assert [text_of(data[i]["input_ids"]) for i in range(2)] == ["first", "second"]


def test_a_chat_template_is_the_tokenizer_s_own(tmp_path: Path) -> None:
    class Chatty(ByteTokenizer):
        chat_template = "there is one"  # type: ignore[assignment]

        def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
            return f"<user>{messages[0]['content']}<bot>"

    config = DataConfig(source=alpaca_file(tmp_path), template="chat")
    assert text_of(read_training_data(config, Chatty())[0]["input_ids"]) == "<user>Add.\n\n1 and 2<bot>3"
    with pytest.raises(UsageError, match="no chat template"):
        read_training_data(config, ByteTokenizer())


def test_what_a_tokenizer_adds_by_itself_stands_once_and_at_the_ends_only(tmp_path: Path) -> None:
    class Framing(ByteTokenizer):
        """Begins every text with 1 and ends it."""

        def __call__(self, text: Any, *, add_special_tokens: bool = True, **_: Any) -> dict[str, Any]:
            plain = super().__call__(text)["input_ids"]
            return {"input_ids": [[1, *ids, END] if add_special_tokens else ids for ids in plain]}

    source = alpaca_file(tmp_path, [{"prompt": "a", "completion": "b"}])
    assert read_training_data(DataConfig(source=source), Framing())[0]["input_ids"].tolist() == [1, 97, 98, END]
    (tmp_path / "t.txt").write_text("c")
    data = read_training_data(DataConfig(source=str(tmp_path / "t.txt"), packing=False), Framing())
    assert data[0]["input_ids"].tolist() == [1, 99, END]


@pytest.mark.skipif(not SHARED.is_dir(), reason="the folder ../shared/data is not here")
def test_alpaca_s_own_file_is_read_whole() -> None:
    data = read(str(SHARED / "alpaca" / "alpaca_en_demo.json"), max_seq_len=4096)
    assert (data.summary.rows, data.summary.samples, data.summary.format) == (999, 999, "instruction")


def test_the_builtin_text_needs_no_file() -> None:
    data = read("builtin", max_seq_len=512)
    assert data.summary.samples > 100


# -- length ------------------------------------------------------------------------------------------------------------


def rows_of_lengths(folder: Path, *lengths: int) -> str:
    """A row of n letters has n + 1 tokens, with its end."""
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": "x" * length}) + "\n" for length in lengths))
    return str(path)


def test_what_is_cut_is_counted(tmp_path: Path) -> None:
    data = read(rows_of_lengths(tmp_path, 3, 9, 5), packing=False, max_seq_len=6)
    assert data.lengths.tolist() == [4, 6, 6]
    summary = data.summary
    assert (summary.truncated_samples, summary.dropped_samples, summary.tokens_left_out) == (1, 0, 4)
    assert "max_seq_len 6: 1 rows cut, 0 dropped, 4 tokens left out" in summary.in_lines()


def test_what_is_too_long_can_be_dropped_or_split(tmp_path: Path) -> None:
    path = rows_of_lengths(tmp_path, 3, 9)
    assert read(path, packing=False, max_seq_len=6, too_long="drop").lengths.tolist() == [4]
    assert read(path, packing=False, max_seq_len=6, too_long="split").lengths.tolist() == [4, 6, 4]


def test_a_sample_of_which_no_answer_is_left_is_dropped(tmp_path: Path) -> None:
    rows = [{"prompt": "x" * 50, "completion": "y"}, {"prompt": "x", "completion": "yes"}]
    data = read(alpaca_file(tmp_path, rows), max_seq_len=20)
    assert (len(data), data.summary.dropped_samples) == (1, 1)


def test_the_longest_sample_is_known(tmp_path: Path) -> None:
    data = read(rows_of_lengths(tmp_path, 3, 9, 5, 9), packing=False)
    assert (data.longest, data.longest_first().tolist()) == (1, [1, 3, 2, 0])
    lengths = data.summary.lengths
    assert (lengths.shortest, lengths.median, lengths.mean, lengths.longest) == (4, 6, 7.5, 10)


# -- what cannot be ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("settings", "said"), [
    ({"packing": False, "max_seq_len": 3}, r"all 2 samples are longer than max_seq_len 3 \(6 to 10 tokens\)"),
    ({"packing": False, "max_seq_len": 3, "too_long": "drop"}, "all 2 samples are longer"),
    ({"packing": True, "max_seq_len": 100}, "16 tokens are too few for one sample of max_seq_len 100"),
    ({"text_column": "content"}, "no column 'content'; it has 'text'"),
    ({"format": "instruction"}, "no 'instruction' and 'output'"),
])  # fmt: skip
def test_data_that_gives_no_sample_is_one_error(tmp_path: Path, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        read(rows_of_lengths(tmp_path, 5, 9), **settings)


@pytest.mark.parametrize(("name", "text", "said"), [
    ("a.jsonl", "", "is empty"), ("a.json", "[]", "is empty"), ("a.txt", " \n", "none of its 1 rows holds any text"),
    ("a.jsonl", '{"text": 3}\n', "row 1: no text in 'text'"), ("a.jsonl", "{]\n", "line 1: not JSON"),
    ("a.jsonl", '{"text": "a"}\n{"txt": "b"}\n', "row 2: no text in 'text'; it has 'txt'"),
    ("a.jsonl", "3\n", "neither text nor"),
])  # fmt: skip
def test_a_file_without_text_is_one_error(tmp_path: Path, name: str, text: str, said: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=said):
        read(str(tmp_path / name))


def test_only_the_word_builtin_means_the_documentation_of_python() -> None:
    with pytest.raises(InputError, match="is empty: nothing says what to train on") as found:
        read_training_data(DataConfig(), ByteTokenizer())
    assert "`builtin`" in str(found.value.hint)


def test_a_device_a_pipe_and_a_socket_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "server"))
        for path, kind in (("/dev/zero", "a device"), (tmp_path / "pipe.txt", "a pipe"), (tmp_path / "server", "a so")):
            with pytest.raises(InputError, match=f"'{path}' is {kind}.*, not a file of text"):
                read(str(path))


@pytest.mark.parametrize(("content", "said"), [
    (b"\0" * 4096, "is not text: it holds zero bytes"), ("wide".encode("utf-16-le"), "it holds zero bytes"),
    (b"\x7fELF\xff\xfe", "is not UTF-8 text"),
])  # fmt: skip
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "weights.bin", "a.txt.gz"])
def test_a_file_that_is_no_text_is_one_error(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    packed = gzip.compress(content) if name.endswith(".gz") else content
    (tmp_path / name).write_bytes(packed)
    with pytest.raises(InputError, match=said):
        read(str(tmp_path / name))


def test_a_line_without_end_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LONGEST_LINE", files.PIECE)
    (tmp_path / "a.jsonl").write_text('{"text": "' + "x" * 3 * files.PIECE)
    with pytest.raises(InputError, match="a line of more than 1,048,576 characters"):
        read(str(tmp_path / "a.jsonl"))


def test_a_file_larger_than_memory_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with (tmp_path / "a.txt").open("wb") as sparse:
        sparse.truncate(1 << 43)
    with pytest.raises(InputError, match="holds more text than the memory of this machine"):
        read(str(tmp_path / "a.txt"))


def test_compressed_text_is_measured_as_it_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"x" * (4 << 20)))
    monkeypatch.setattr(files, "host_memory", lambda: {"total_bytes": 3 << 20})
    with pytest.raises(InputError, match="holds more text than the memory of this machine, 3"):
        read(str(tmp_path / "a.txt.gz"))


def test_a_name_that_the_disk_cannot_hold_is_one_error() -> None:
    with pytest.raises(InputError, match="cannot be looked at: File name too long"):
        read("x" * 5000)


def test_the_right_column_is_suggested(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"id": 7, "texts": "hello"}\n')
    with pytest.raises(InputError) as found:
        read(str(path))
    assert found.value.hint == "data.text_column: texts reads that column"


def test_a_missing_file_is_said_with_what_is_close(tmp_path: Path) -> None:
    text_file(tmp_path)
    with pytest.raises(InputError, match="no file") as found:
        read(str(tmp_path / "plai.txt"))
    assert "play.txt" in str(found.value.hint)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path / "cache"


def test_a_data_set_of_the_hub_is_read_file_by_file_as_far_as_needed(cache: Path) -> None:
    for number, words in enumerate(("some words", "other words", "")):
        row = b'{"text": "%s"}\n' % words.encode() if words else b"{oops"
        put_into_cache(cache, "datasets", "org/some-set", f"small/test-{number}.jsonl", row)
    data = read("org/some-set", subset="small", split="test", max_samples=2, packing=False)
    assert [text_of(data[i]["input_ids"]) for i in range(2)] == ["some words", "other words"]
    with pytest.raises(InputError, match=r"data.source 'org/some-set': .*test-2.jsonl', line 1: not JSON"):
        read("org/some-set", subset="small", split="test")


def test_a_data_set_that_cannot_be_had_is_one_error_with_what_else_works(cache: Path) -> None:
    with pytest.raises(InputError, match=r"data.source 'org/some-set': .* HF_HUB_OFFLINE is set") as caught:
        read("org/some-set")
    assert "or `builtin`" in str(caught.value.hint)


def test_parquet_is_read_as_rows(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(ALPACA), tmp_path / "a.parquet")
    assert learned(read(str(tmp_path / "a.parquet"))[1]) == "Hello!"


def test_parquet_without_its_package_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(InputError, match="needs the package pyarrow"):
        read(str(tmp_path / "a.parquet"))


def test_an_empty_folder_and_rows_are_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="in that folder"):
        read(str(tmp_path))
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "abc"}\n{"text": ""}\n{"text": null}\n')
    assert read(str(path), packing=False).summary.empty_rows == 2


def test_only_the_first_rows_are_read_if_asked_for(tmp_path: Path) -> None:
    assert len(read(alpaca_file(tmp_path), max_samples=2)) == 2


# -- batches -----------------------------------------------------------------------------------------------------------


def test_a_batch_is_filled_up_on_the_right_and_filling_is_never_learned(tmp_path: Path) -> None:
    data = read(rows_of_lengths(tmp_path, 1, 3), packing=False)
    batch = Collator(0)([data[0], data[1]])
    assert batch["input_ids"].tolist() == [[120, END, 0, 0], [120, 120, 120, END]]
    assert batch["labels"].tolist() == [[120, END, IGNORED, IGNORED], [120, 120, 120, END]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]


def test_full_samples_need_no_mask(tmp_path: Path) -> None:
    data = read(text_file(tmp_path), max_seq_len=16)
    assert set(Collator(0, mask=not data.packed)([data[0], data[1]])) == {"input_ids", "labels"}


# -- order -------------------------------------------------------------------------------------------------------------


def test_reading_twice_gives_the_same_samples(tmp_path: Path) -> None:
    path = alpaca_file(tmp_path)
    assert read(path).fingerprint == read(path).fingerprint
    assert read(path).fingerprint != read(alpaca_file(tmp_path, ALPACA[::-1])).fingerprint


def test_every_epoch_has_its_own_order_and_every_sample_once() -> None:
    first, second = (epoch_order(100, seed=1, epoch=epoch).tolist() for epoch in (0, 1))
    assert sorted(first) == sorted(second) == list(range(100))
    assert first != second
    assert first != epoch_order(100, seed=2, epoch=0).tolist()
    assert epoch_order(5, seed=1, epoch=3, shuffle=False).tolist() == [0, 1, 2, 3, 4]


def test_steps_go_through_epoch_after_epoch_without_a_seam() -> None:
    steps = [rows_of_step(step, samples=10, global_batch_size=4, seed=3) for step in range(5)]
    epochs = torch.cat([epoch_order(10, seed=3, epoch=epoch) for epoch in (0, 1)])
    assert torch.equal(torch.cat(steps), epochs)


def test_a_global_batch_may_be_larger_than_the_data() -> None:
    rows = rows_of_step(0, samples=3, global_batch_size=8, seed=0)
    assert torch.bincount(rows).tolist() in ([3, 3, 2], [3, 2, 3], [2, 3, 3])


def test_how_many_steps_follows_from_epochs_or_is_said() -> None:
    assert total_steps(ScheduleConfig(max_steps=7), samples=100, global_batch_size=16) == 7
    assert total_steps(ScheduleConfig(), samples=100, global_batch_size=16) == 7
    assert total_steps(ScheduleConfig(epochs=0.1), samples=10, global_batch_size=16) == 1
