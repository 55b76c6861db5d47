"""Tokenizers and data sets that are not on this machine: one clear error, or made up where that is asked for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import memfit
from memfit.cli.main import main
from memfit.errors import MemfitError, TraceError
from memfit.scripts.made_up_columns import columns_are_made_up, columns_asked_for, with_columns_asked_for
from memfit.scripts.made_up_processors import settings_made_up
from memfit.scripts.made_up_rows import as_long_as_published, columns_of, columns_told, data_sets_of, sound

NLTK = """
class data:
    @staticmethod
    def find(path):
        raise LookupError(path)
def sent_tokenize(text, language="english"):
    data.find("tokenizers/punkt_tab")
word_tokenize = sent_tokenize
def download(name):
    raise OSError("there is no network")
"""
"""What it does where its files are not here."""
TOKENIZED = """
import json, pathlib
import torch
from transformers import AutoTokenizer, GPT2Tokenizer
tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen2.5-0.5B", padding_side="left")
batch = tokenizer(["a" * 400, "b" * 40], padding=True, truncation=True, max_length=64, return_tensors="pt")
talk = tokenizer.apply_chat_template([{"role": "user", "content": "hello there"}], tokenize=False)
pathlib.Path("told.json").write_text(json.dumps({
    "shape": list(batch["input_ids"].shape), "mask": batch["attention_mask"].sum(1).tolist(), "size": len(tokenizer),
    "highest": int(batch["input_ids"].max()), "eos": tokenizer.eos_token_id, "talk": talk,
    "pad": tokenizer.pad_token_id, "other": len(GPT2Tokenizer.from_pretrained("gpt2")),
    "t5": len(AutoTokenizer.from_pretrained("t5-base", model_max_length=512)),
}))
batch.to("cuda")
"""
DATA = """
import torch
from datasets import load_dataset
whole = load_dataset("imdb")
rows = load_dataset("glue", "mrpc", split="train[:10%]")
stream = load_dataset("wikitext", "wikitext-2-raw-v1", split="train", streaming=True)
assert set(whole) == {"train", "validation", "test"} and set(whole["train"].column_names) == {"text", "label"}
assert sum(1 for _ in zip(range(3000), stream)) == 3000
assert {"sentence1", "sentence2", "label"} <= set(rows.column_names) and len(next(iter(stream))["text"]) > 4000
torch.zeros(1, device="cuda")
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))


def test_a_made_up_tokenizer_has_the_model_s_vocabulary_and_plausible_lengths(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TOKENIZED)
    plan = memfit.trace_script("train.py", synthetic_data=True)
    told = json.loads((tmp_path / "told.json").read_text())
    assert told["shape"] == [2, 64] and told["mask"] == [64, 10] and told["talk"] == "user: hello there\n"
    assert told["size"] == 151936 and told["highest"] < told["size"] and told["other"] == 50257
    assert told["t5"] == 32128
    assert told["eos"] is not None and told["pad"] is not None
    assert any("Qwen/Qwen2.5-0.5B: a made-up tokenizer" in note for note in plan.notes)


@pytest.mark.parametrize("name", ["xlnet-base-cased", "Helsinki-NLP/opus-mt-en-ro"])
def test_a_tokenizer_is_made_up_whatever_its_class_says_of_files_that_are_not_there(tmp_path: Path, name: str) -> None:
    pytest.importorskip("sentencepiece", reason="sentencepiece is not installed: `make test-all` does")
    (tmp_path / "train.py").write_text(
        "import torch\nfrom transformers import AutoTokenizer\n"
        f"tokenizer = AutoTokenizer.from_pretrained({name!r})\n"
        "assert len(tokenizer('a' * 4000, truncation=True, max_length=64)['input_ids']) == 64\n"
        "torch.zeros(min(tokenizer.model_max_length, 9), device='cuda')\n"
    )
    plan = memfit.trace_script("train.py", synthetic_data=True)
    assert any(note.startswith(f"{name}: a made-up tokenizer") for note in plan.notes)


def test_what_processes_text_for_a_model_is_its_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import torch\nfrom transformers import AutoConfig, AutoProcessor\nname = 'HuggingFaceTB/SmolLM2-135M'\n"
        "assert AutoConfig.from_pretrained(name).architectures == ['LlamaForCausalLM']\n"
        "tokenizer = AutoProcessor.from_pretrained(name, truncation_side='left')\n"
        "assert tokenizer(['a' * 40], return_tensors='pt')['input_ids'].cuda().shape == (1, 10)\n"
    )
    assert memfit.trace_script("train.py", synthetic_data=True).peak.allocated_bytes


def test_what_prepares_sound_is_made_up_for_a_model_that_hears(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import numpy, torch\nfrom transformers import AutoFeatureExtractor, AutoProcessor\n"
        "processor = AutoProcessor.from_pretrained('openai/whisper-large-v3')\n"
        "heard = processor(numpy.zeros(16000), sampling_rate=16000, return_tensors='pt').input_features\n"
        "assert heard.shape == (1, 128, 3000) and len(processor.tokenizer) == 51866\n"
        "assert AutoFeatureExtractor.from_pretrained('facebook/wav2vec2-base').sampling_rate == 16000\n"
        "heard.cuda()\n"
    )
    notes = memfit.trace_script("train.py", synthetic_data=True).notes
    assert "openai/whisper-large-v3: a made-up WhisperFeatureExtractor" in notes
    with pytest.raises(MemfitError, match=r"train.py:3: the code loads something from the Hub"):
        memfit.trace_script("train.py")


def test_whisper_knows_its_languages(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import torch\nfrom transformers import AutoTokenizer, WhisperForConditionalGeneration\n"
        "model = WhisperForConditionalGeneration.from_pretrained('openai/whisper-tiny').cuda()\n"
        "said = model.generation_config\n"
        "assert said.is_multilingual and said.no_timestamps_token_id == 50363 and len(said.lang_to_id) == 99\n"
        "assert said.lang_to_id['<|hi|>'] == 50276 and said.task_to_id == {'translate': 50358, 'transcribe': 50359}\n"
        "tokenizer = AutoTokenizer.from_pretrained('openai/whisper-tiny')\n"
        "tokenizer.set_prefix_tokens(language='hindi', task='transcribe')\n"
    )
    assert memfit.trace_script("train.py", synthetic_data=True).peak.allocated_bytes


@pytest.mark.parametrize(("norm", "has_mask"), [("layer", True), ("group", None)])
def test_sound_has_a_mask_where_the_model_was_trained_with_one(norm: str, has_mask: bool | None) -> None:
    made = settings_made_up({"model_type": "wav2vec2", "feat_extract_norm": norm})
    assert made is not None and made.get("return_attention_mask") is has_mask


def test_what_prepares_pictures_makes_them_as_large_as_the_model_sees(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    (tmp_path / "train.py").write_text(
        "from PIL import Image\nfrom transformers import CLIPImageProcessor, ViTImageProcessor\n"
        "picture, name = Image.new('RGB', (500, 375)), 'openai/clip-vit-large-patch14'\n"
        "seen = ViTImageProcessor.from_pretrained('google/vit-base-patch16-224-in21k')(picture, return_tensors='pt')\n"
        "both = CLIPImageProcessor.from_pretrained(name)(picture, return_tensors='pt')\n"
        "assert seen['pixel_values'].shape == both['pixel_values'].shape == (1, 3, 224, 224)\n"
        "seen['pixel_values'].cuda()\n"
    )
    notes = memfit.trace_script("train.py", synthetic_data=True).notes
    assert "google/vit-base-patch16-224-in21k: a made-up ViTImageProcessor, pictures of 224x224" in notes


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        ({"model_type": "vit", "image_size": 384}, {"size": {"height": 384, "width": 384}}),
        ({"model_type": "llava", "vision_config": {"image_size": 336}}, {"size": {"shortest_edge": 336}}),
        ({"model_type": "detr", "image_size": 64}, {"size": {"shortest_edge": 800, "longest_edge": 1333}}),
        ({"model_type": "llama"}, None),
    ],
)
def test_the_size_of_pictures_is_the_config_s_or_the_default(config: dict[str, Any], settings: Any) -> None:
    found = settings_made_up(config)
    assert (found and {"size": found["size"]}) == settings


def test_without_the_flag_a_missing_tokenizer_is_one_clear_error(tmp_path: Path, capfd) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "train.py").write_text(TOKENIZED)
    assert main(["plan", "script", "--", "train.py"]) == 2
    said = capfd.readouterr().err
    assert "train.py:5: the code loads something from the Hub" in said and "--synthetic-data" in said
    assert main(["plan", "script", "--synthetic-data", "--json", "--", "train.py"]) == 0
    assert json.loads(capfd.readouterr().out)["workload"]["synthetic_data"] is True


def test_a_data_set_s_columns_are_told_by_its_name() -> None:
    assert list(columns_of("glue mrpc")) == ["sentence1", "sentence2", "label", "idx"]
    assert list(columns_of("HuggingFaceH4/ultrachat_200k")) == ["messages"]
    assert list(columns_of("Anthropic/hh-rlhf")) == ["chosen", "rejected"]
    assert list(columns_of("ptb_text_only")) == ["sentence"]
    assert list(columns_of("my/own")) == ["text", "label"]
    assert list(columns_of("allenai/c4 en")) == list(columns_of("wikitext")) == ["text"]
    assert columns_told("allenai/c4 en", columns_of("allenai/c4 en")) == "text, up to 4,000 words a text"
    answers = columns_of("trl-lib/ultrafeedback_binarized")["chosen"], columns_of("my/chat")["messages"][1]["content"]
    assert [answer.count("word") for answer in answers] == [1000, 500]
    assert columns_told("my/chat", columns_of("my/chat")) == "messages, up to 500 words a text"
    assert columns_told("gsm8k", columns_of("gsm8k")) == "question, answer, up to 100 words a text"
    assert len(columns_of("xsum")["document"]) > len(columns_of("xsum")["summary"]) > 0


@pytest.mark.parametrize(
    ("name", "words", "told"),
    [
        ("glue mrpc", {"sentence1": 40, "sentence2": 40}, 80),
        ("nyu-mll/glue mnli", {"premise": 405, "hypothesis": 75}, 480),
        ("stanfordnlp/imdb", {"text": 2500}, 2500),
        ("squad_v2", {"context": 660, "question": 45}, 705),
        ("sentence-transformers/all-nli triplet", {"anchor": 405, "positive": 75, "negative": 75}, 555),
    ],
)
def test_a_public_set_s_rows_are_as_long_as_its_longest(name: str, words: dict[str, int], told: int) -> None:
    row = columns_of(name)

    assert {column: row[column].count("word") for column in words} == words
    assert columns_told(name, row).endswith(f"rows of up to {told:,} words, as the public set's longest")


@pytest.mark.parametrize("name", ["my/mrpc-pairs", "me/imdb-long", "my/own", "wikitext wikitext-2-raw-v1"])
def test_a_set_that_only_sounds_like_a_public_one_has_long_texts(name: str) -> None:
    row = columns_of(name)

    assert max(text.count("word") for text in row.values() if isinstance(text, str)) == 1000
    assert "public set" not in columns_told(name, row)


def test_a_column_that_the_program_asks_for_is_as_long_as_the_public_set_s() -> None:
    row = as_long_as_published("SetFit/sst2", columns_of("SetFit/sst2") | columns_asked_for(["text"], {}))

    assert (row["text"].count("word"), row["sentence"].count("word")) == (55, 55)


@pytest.mark.parametrize(
    ("name", "languages"),
    [
        ("opus_books en-it", ["en", "it"]),
        ("Helsinki-NLP/opus-100 af-en", ["af", "en"]),
        ("iwslt2017 iwslt2017-de-en", ["de", "en"]),
        ("my/own fi-sv", ["fi", "sv"]),
        ("wmt16", ["en", "de", "fr", "ro"]),
    ],
)
def test_languages_are_those_of_the_config_s_name(name: str, languages: list[str]) -> None:
    assert list(columns_of(name)["translation"]) == languages


@pytest.mark.parametrize(
    ("names", "columns"),
    [
        (
            "ethz/food101 ylecun/mnist imagenet-1k timm/oxford-iiit-pet zalando/fashion_mnist my/images",
            ["image", "label"],
        ),
        ("AI-Lab-Makerere/beans", ["image_file_path", "image", "labels"]),
        ("uoft-cs/cifar10", ["img", "label"]),
        ("superb-ks", ["file", "audio", "label"]),
        ("my/invoices tweets_hate_speech_detection", ["text", "label"]),
    ],
)
def test_pictures_have_labels(names: str, columns: list[str]) -> None:
    assert [list(columns_of(name)) for name in names.split()] == [columns] * len(names.split())


@pytest.mark.parametrize(
    "name", ["mozilla-foundation/common_voice_11_0 hi", "librispeech_asr clean", "superb asr", "my/speech"]
)
def test_speech_has_sound_and_what_is_said_in_short(name: str) -> None:
    row = columns_of(name)
    assert {"audio", "sentence", "text"} <= set(row) and len(row["sentence"].split()) == 40
    heard = sound(8000, "made-up-15s.wav")
    assert heard["sampling_rate"] == 8000 and heard["array"].shape == (15 * 8000,)


@pytest.mark.parametrize(
    ("cause", "told"),
    [
        (KeyError("sentence"), True),
        (ValueError("Column to remove ['id'] not in the dataset"), True),
        (ValueError("batch_size should be positive"), False),
        (RuntimeError("no such column"), False),
    ],
)
def test_a_column_that_a_made_up_data_set_lacks_is_told_beside_the_error(cause: Exception, told: bool) -> None:
    with pytest.raises(TraceError, match="the job itself fails") as error, columns_are_made_up({"my/own": ("text",)}):
        raise TraceError("the job itself fails: ...", hint="raised at train.py:3") from cause
    assert error.value.hint.startswith("raised at train.py:3")
    assert ("made up by --synthetic-data: my/own has text; the real one may have" in error.value.hint) is told


@pytest.mark.parametrize(
    ("name", "learned"),
    [
        ("tatsu-lab/alpaca", lambda row: row["output"]),
        ("HuggingFaceH4/ultrachat_200k", lambda row: "".join(each["content"] for each in row["messages"][3::2])),
        ("trl-lib/ultrafeedback_binarized", lambda row: row["rejected"]),
        ("Anthropic/hh-rlhf", lambda row: row["chosen"].rpartition("\n\nAssistant: ")[2]),
        ("ptb_text_only", lambda row: row["sentence"]),
    ],
)
def test_what_is_learned_of_a_made_up_row_is_long_so_that_the_program_s_own_truncation_bounds_it(name, learned) -> None:  # type: ignore[no-untyped-def]
    assert learned(columns_of(name)).split() == ["word"] * 1000


def test_a_program_that_wants_another_vocabulary_hears_that_this_one_is_made_up(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "from transformers import AutoTokenizer\ntokenizer = AutoTokenizer.from_pretrained('t5-base')\n"
        "if len(tokenizer) != 32_100: raise ValueError('the vocabularies differ')\n"
    )
    with pytest.raises(TraceError) as error:
        memfit.trace_script("train.py", synthetic_data=True)
    assert "made up by --synthetic-data: t5-base has a tokenizer of 32,128 tokens; the real" in str(error.value.hint)


def test_data_sets_are_made_up_where_that_is_asked_for(tmp_path: Path) -> None:
    pytest.importorskip("datasets", reason="datasets is not installed: `make test-all` does")
    (tmp_path / "train.py").write_text(DATA)
    plan = memfit.trace_script("train.py", synthetic_data=True)
    assert any("imdb: a made-up data set with the columns text, label" in note for note in plan.notes)
    with pytest.raises(MemfitError, match=r"train.py:4: the code loads something from the Hub"):
        memfit.trace_script("train.py")


SEEN_AND_HEARD = """
import torch
from datasets import Audio, load_dataset
books = load_dataset("opus_books", "en-it", split="train")
assert set(books[0]["translation"]) == {"en", "it"} and "test_matched" in load_dataset("glue", "mnli")
food = load_dataset("ethz/food101")["train"]
assert food[0]["image"].convert("RGB").size == (500, 375) and food.features["label"].num_classes == 101
rows = load_dataset("mozilla-foundation/common_voice_11_0", "hi", split="train+validation")
rows = rows.remove_columns(["path", "gender"]).cast_column("audio", Audio(sampling_rate=8000))
rows = rows.map(lambda row: {"audio": row["audio"], "size": len(row["audio"]["array"])})
assert rows[0]["size"] == 120_000 and rows[0]["audio"]["sampling_rate"] == 8000
torch.zeros(1, device="cuda")
food[0]["a caption"]
"""


def test_pictures_and_sound_are_made_up_and_a_column_that_lacks_is_no_fault_of_the_job(tmp_path: Path) -> None:
    pytest.importorskip("datasets", reason="datasets is not installed: `make test-all` does")
    pytest.importorskip("PIL")
    (tmp_path / "train.py").write_text(SEEN_AND_HEARD)
    with pytest.raises(MemfitError, match="KeyError: 'a caption'") as error:
        memfit.trace_script("train.py", synthetic_data=True)
    assert "opus_books en-it has id, translation; glue mnli has " in error.value.hint


ASKED_FOR = """
import torch
from datasets import load_dataset
rows = load_dataset("my/own", split="train")
made = rows.map(lambda row: {"both": row["query"] + row["response"]}, num_proc=4)
assert len(made[0]["query"]) == 5000 and len(made[5]["query"]) == 250 and made[0]["caption"].count("word") == 100
assert len(rows.select(range(10_000))) == len(rows.train_test_split(test_size=10_000)["test"]) == 10_000
assert len(rows.train_test_split(test_size=0.0005)["test"]) == 100 and len(rows.train_test_split(0.25)["test"]) > 200
assert len(load_dataset("superb", "ks")["train"][0]["audio"]["array"]) == 16_000
torch.zeros(1, device="cuda")
"""


def test_a_column_that_the_program_asks_for_is_made_up_in_another_run(tmp_path: Path) -> None:
    pytest.importorskip("datasets", reason="datasets is not installed: `make test-all` does")
    (tmp_path / "train.py").write_text(ASKED_FOR)
    plan = memfit.trace_script("train.py", synthetic_data=True)
    told = "my/own: a made-up data set with the columns text, label, query, response, caption"
    assert any(note.startswith(told) for note in plan.notes)


def test_a_column_is_asked_for_by_its_key_or_as_the_command_names_it() -> None:
    more: list[tuple[str, ...]] = []

    def once(more_columns: tuple[str, ...]) -> int:
        more.append(more_columns)
        missing = [KeyError("query"), ValueError("--image_column value 'picture_path' needs to be one of: text, label"),
                   ValueError("Column 'qid' doesn't exist."),
                   ValueError("`--hint_column` value 'hint' not found in dataset columns.")]  # fmt: skip
        if len(more_columns) < len(missing):
            with columns_are_made_up({"my/own": ("text",)}, ["--image_column=picture_path"]):
                raise TraceError("the job itself fails", hint="raised at train.py:3") from missing[len(more_columns)]
        return 1

    assert with_columns_asked_for(once) == 1
    wanted = ("query", "picture_path", "qid", "hint")
    assert more == [wanted[:count] for count in range(5)]


def test_a_program_that_still_lacks_the_column_is_told_of_it() -> None:
    def once(more_columns: tuple[str, ...]) -> None:
        with columns_are_made_up({"my/own": ("text",)}):
            raise TraceError("the job itself fails", hint="raised at train.py:3") from KeyError("rank")

    with pytest.raises(TraceError, match="the job itself fails"):
        with_columns_asked_for(once)


def test_what_an_asked_for_column_holds_its_name_tells() -> None:
    pytest.importorskip("PIL")
    names = ["image_path", "photo", "audio", "messages", "category_id", "summary", "response", "text"]
    made = columns_asked_for(names, {"text": "kept"})
    assert Path(made.pop("image_path")).read_bytes()[1:4] == b"PNG"
    assert (made["photo"], made["audio"], made["category_id"]) == ("{picture}", "{sound}", 0)
    assert [each["role"] for each in made["messages"]] == ["user", "assistant"] * 3
    assert made["summary"].count("word") == 100 and made["response"].count("word") == 1000 and "text" not in made


def test_every_sixth_row_is_short_so_that_batches_have_masks() -> None:
    class Rows:
        @staticmethod
        def from_list(rows: list[Any]) -> Any:
            return SimpleNamespace(rows=rows, features={}, info=SimpleNamespace())

    made = data_sets_of("my/own", columns_of("my/own"), SimpleNamespace(Dataset=Rows, ClassLabel=lambda names: None))
    words = [row["text"].count("word") for row in made["train"].rows[:12]]
    assert words == [1000] * 5 + [50] + [1000] * 5 + [50]


def test_a_short_talk_still_says_who_speaks() -> None:
    class Rows:
        @staticmethod
        def from_list(rows: list[Any]) -> Any:
            return SimpleNamespace(rows=rows, features={}, info=SimpleNamespace())

    name = "Anthropic/hh-rlhf"
    made = data_sets_of(name, columns_of(name), SimpleNamespace(Dataset=Rows, ClassLabel=lambda names: None))
    short = made["train"].rows[5]["chosen"]
    assert short == "\n\nHuman: " + "word " * 5 + "\n\nAssistant: " + "word " * 50


NAMES_AND_SENTENCES = """
import json
import nltk
import pathlib
import torch
from huggingface_hub import hf_hub_download
try:
    nltk.data.find("tokenizers/punkt")
except LookupError:
    nltk.download("punkt")
assert nltk.sent_tokenize("One. Two.") == ["One.", "Two."]
file = hf_hub_download("huggingface/label-files", "ade20k-id2label.json", repo_type="dataset")
names = json.loads(pathlib.Path(file).read_text())
assert len(names) == 150 and names["3"] == "class 3"
torch.zeros(1, device="cuda")
"""


def test_names_of_classes_and_the_data_of_nltk_are_made_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "nltk.py").write_text(NLTK)
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    monkeypatch.delitem(sys.modules, "nltk", raising=False)
    (tmp_path / "train.py").write_text(NAMES_AND_SENTENCES)
    plan = memfit.trace_script("train.py", synthetic_data=True)
    sys.modules.pop("nltk")
    assert any("a made-up ade20k-id2label.json, 150 classes" in note for note in plan.notes)
    assert any("nltk's own data is not here" in note for note in plan.notes)


LIBRARY = "from datasets import load_dataset\ndef rows(): return load_dataset('glue', 'mrpc', split='train')\n"
"""Installed beside datasets, and imported before it."""


def test_a_library_that_imports_datasets_itself_is_given_made_up_ones_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("datasets", reason="datasets is not installed: `make test-all` does")
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "reads_rows.py").write_text(LIBRARY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site-packages"), prepend=os.pathsep)
    (tmp_path / "train.py").write_text(
        "import reads_rows, torch\nassert 'sentence1' in reads_rows.rows()[0]\ntorch.zeros(1, device='cuda')\n"
    )
    command = [sys.executable, "-m", "memfit", "plan", "script", "--synthetic-data", "--", "train.py"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "glue mrpc: a made-up data set" in said


ENCODED = """
import tiktoken, torch
for name, size in (("gpt2", 50257), ("p50k_base", 50281), ("cl100k_base", 100277), ("o200k_base", 200019)):
    assert tiktoken.get_encoding(name).n_vocab == size, name
encoding = tiktoken.encoding_for_model("gpt-4o")
assert len(encoding.encode_ordinary("a" * 401)) == 101 and len(encoding.decode(encoding.encode("a" * 40))) > 10
ended = encoding.encode("a" * 8 + "<|endoftext|>", allowed_special={"<|endoftext|>"})
assert len(ended) == 3 and ended[-1] == encoding.eot_token
torch.tensor(encoding.encode_to_numpy("a" * 400), dtype=torch.long, device="cuda")
"""


def test_an_encoding_of_tiktoken_is_made_up_in_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tiktoken", reason="tiktoken is not installed: `make test-all` does")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "none"))
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    (tmp_path / "train.py").write_text(ENCODED)
    plan = memfit.trace_script("train.py", synthetic_data=True)
    assert plan.peak.allocated_bytes == 1024
    assert any(note.startswith("gpt2: a made-up encoding of 50,257 tokens") for note in plan.notes)


TORCHVISION = """
import os
class VisionDataset:
    def __init__(self, root, transform=None):
        self.root, self.transform = root, transform
class CIFAR10(VisionDataset):
    def __init__(self, root, train=True, transform=None, download=False):
        super().__init__(root, transform)
        self.train = train
        if download:
            self.download()
        if not os.path.isdir(root):
            raise RuntimeError("Dataset not found or corrupted")
        self.data = "read"
    def download(self):
        os.makedirs(self.root)
class MNIST(CIFAR10): pass
class SVHN(CIFAR10): pass
class STL10(VisionDataset):
    def __init__(self, root, split="train", download=False):
        super().__init__(root)
        self.split = split
        self.download() if download else None
        self.data = open(root + "/train_X.bin")
    def download(self):
        os.makedirs(self.root)
class DatasetFolder(VisionDataset):
    def __init__(self, root, transform=None):
        super().__init__(root, transform)
        self.classes = os.listdir(root)
        if not self.classes:
            raise FileNotFoundError("Couldn't find any class folder")
class ImageFolder(DatasetFolder):
    def __init__(self, root, transform=None):
        super().__init__(root, transform)
        self.imgs = self.samples
"""
"""Of which no build without CUDA is to be had here: what its classes do where they find no files."""
TORCHVISION_READ = """
import os
import torch
from torchvision import datasets
os.mkdir("here")
small, large = datasets.CIFAR10("no", download=True), datasets.ImageFolder("imagenet/train")
assert small.data.shape == (50_000, 32, 32, 3) and len(set(small.targets)) == 10
assert datasets.CIFAR10("here").data == "read" and datasets.MNIST("none", train=False).data.shape == (10_000, 28, 28)
both = datasets.STL10("none", split="train+unlabeled", download=True)
assert both.data.shape == (105_000, 3, 96, 96) and set(both.labels[5000:]) == {-1} and len(set(both.labels)) == 11
assert len(large.classes) == 1000 and large.loader(large.imgs[0][0]).size == (500, 375)
torch.zeros(1, device="cuda")
datasets.ImageFolder("here")
"""


def test_data_sets_of_torchvision_are_made_up_and_never_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("PIL")
    installed = tmp_path / "site-packages" / "torchvision"
    installed.mkdir(parents=True)
    (installed / "__init__.py").write_text("")
    (installed / "datasets.py").write_text(TORCHVISION)
    monkeypatch.syspath_prepend(installed.parent)
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "train.py").write_text(TORCHVISION_READ)
    with pytest.raises(MemfitError, match="Couldn't find any class folder"):
        memfit.trace_script("train.py", synthetic_data=True)
    assert not (tmp_path / "no").exists()
    (tmp_path / "here").rmdir()
    (tmp_path / "train.py").write_text(TORCHVISION_READ.removesuffix('datasets.ImageFolder("here")\n'))
    notes = memfit.trace_script("train.py", synthetic_data=True).notes
    assert "CIFAR10 in no: made-up pictures, 32x32, 10 classes" in notes
    assert "ImageFolder in imagenet/train: made-up pictures, 500x375, 1,000 classes" in notes


TIMM = """
class ImageDataset:
    def __init__(self, root, reader=None, split="train"): self.reader = reader or root
"""
TIMM_READ = """
import torch
from PIL import Image
from timm.data.dataset import ImageDataset
made = ImageDataset("/data/imagenet", reader="", split="train").reader
file, label = made[1001]
assert Image.open(file).size == (500, 375) and label == 1 and len(made.class_to_idx) == 1000
assert made.filename(7) == made.filenames()[7] == "/data/imagenet/7.jpg" and len(made) == 5000
assert ImageDataset(__file__).reader == __file__
torch.zeros(1, device="cuda")
"""


def test_a_folder_of_pictures_that_timm_does_not_find_is_made_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("PIL")
    installed = tmp_path / "site-packages" / "timm" / "data"
    installed.mkdir(parents=True)
    for package in (installed, installed.parent):
        (package / "__init__.py").write_text("")
    (installed / "dataset.py").write_text(TIMM)
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    for name in [name for name in sys.modules if name.partition(".")[0] == "timm"]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "train.py").write_text(TIMM_READ)
    notes = memfit.trace_script("train.py", synthetic_data=True).notes
    assert "ImageDataset in /data/imagenet: made-up pictures, 500x375, 1,000 classes" in notes


METRIC = """
import torch, evaluate
metric = evaluate.load("glue", "mrpc")
metric.add_batch(predictions=torch.randn(4, 2, device="cuda").argmax(-1), references=torch.zeros(4))
print("scores", metric.compute())
"""


def test_a_metric_that_is_not_here_has_scores_that_nobody_knows(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "evaluate.py").write_text("def load(*_): raise FileNotFoundError('not on the Hub')")
    (tmp_path / "train.py").write_text(METRIC)
    plan = memfit.trace_script("train.py", synthetic_data=True)
    assert "'accuracy': ?" in capfd.readouterr().err
    assert any("glue: a metric that is not here" in note for note in plan.notes)
