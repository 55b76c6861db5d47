"""Perplexity is that of the published protocol, whatever is streamed and however the logits are cut."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from tiny_folder import byte_tokenizer, english, model_folder

from memfit.errors import InputError
from memfit.jobs.pruning import evaluation as perplexity
from memfit.jobs.pruning.decoder import Decoder
from memfit.jobs.pruning.engine import Engine
from memfit.jobs.pruning.evaluation import evaluation_windows, perplexity_of_model
from memfit.jobs.texts import find_texts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text(english(60))
    return str(path)


def published(folder: Path, ids: torch.Tensor) -> float:
    """The loop of the papers: one window at a time, the model whole, its logits too."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    total, length = 0.0, ids.shape[1]
    with torch.no_grad():
        for window in ids:
            logits = model(window[None]).logits
            loss = torch.nn.CrossEntropyLoss()(logits[0, :-1].float(), window[1:])
            total += loss.item() * length
    return math.exp(total / (len(ids) * length))


def test_it_is_what_the_published_loop_gives(folder: Path, text: str) -> None:
    windows = evaluation_windows(find_texts(text, "evaluation"), byte_tokenizer(), seqlen=50)
    with Engine(Decoder.open(folder), device="cpu") as engine:
        found = perplexity_of_model(engine, windows.ids)
    assert found == pytest.approx(published(folder, windows.ids), rel=1e-5)


@pytest.mark.parametrize("tokens", [1, 7, 49, 1000])
def test_logits_in_pieces_of_any_size_give_the_same(
    folder: Path, text: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows = evaluation_windows(find_texts(text, "evaluation"), byte_tokenizer(), seqlen=50, most=3)
    monkeypatch.setattr(perplexity, "LOGITS_BYTES", tokens * 4 * 272)
    with Engine(Decoder.open(folder), device="cpu") as engine:
        found = perplexity_of_model(engine, windows.ids)
    assert found == pytest.approx(published(folder, windows.ids), rel=1e-5)


def test_no_more_logits_are_made_at_once_than_said(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    windows = evaluation_windows(find_texts(text, "evaluation"), byte_tokenizer(), seqlen=50, most=2)
    monkeypatch.setattr(perplexity, "LOGITS_BYTES", 10 * 4 * 272)
    seen: list[tuple[int, ...]] = []
    plain = Engine.logits

    def noting(self: Engine, hidden: torch.Tensor) -> torch.Tensor:
        made = plain(self, hidden)
        seen.append(tuple(made.shape))
        return made

    monkeypatch.setattr(Engine, "logits", noting)
    with Engine(Decoder.open(folder), device="cpu") as engine:
        perplexity_of_model(engine, windows.ids)
    assert seen == [(1, 10, 272)] * 4 + [(1, 9, 272)] + [(1, 10, 272)] * 4 + [(1, 9, 272)]


def test_the_loss_is_taken_in_fp32_of_16_bit_weights(tmp_path: Path, text: str) -> None:
    from transformers import AutoModelForCausalLM

    folder = model_folder(tmp_path)
    AutoModelForCausalLM.from_pretrained(folder).to(torch.bfloat16).save_pretrained(folder)
    windows = evaluation_windows(find_texts(text, "evaluation"), byte_tokenizer(), seqlen=50, most=4)
    with Engine(Decoder.open(folder), device="cpu") as engine:
        assert engine.decoder.dtype == torch.bfloat16
        found = perplexity_of_model(engine, windows.ids)
    assert found == pytest.approx(published(folder, windows.ids), rel=2e-3)


def test_windows_do_not_overlap_and_the_tail_is_dropped(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abcdefghijk")
    windows = evaluation_windows(find_texts(str(tmp_path / "a.txt"), "evaluation"), byte_tokenizer(), seqlen=3)
    assert [byte_tokenizer().decode(window.tolist()) for window in windows.ids] == ["abc", "def", "ghi"]
    assert windows.notes == ()
    few = evaluation_windows(find_texts(str(tmp_path / "a.txt"), "evaluation"), byte_tokenizer(), seqlen=3, most=2)
    assert (len(few.ids), few.notes) == (2, ("perplexity is of the first 2 of 3 windows",))


def test_a_text_shorter_than_a_window_says_how_many_tokens_it_has(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abc")
    with pytest.raises(InputError, match="has only 3 tokens; perplexity at --seqlen 4 needs at least 4"):
        evaluation_windows(find_texts(str(tmp_path / "a.txt"), "evaluation"), byte_tokenizer(), seqlen=4)


def test_every_fiftieth_window_is_told(folder: Path, text: str) -> None:
    windows = evaluation_windows(find_texts(text, "evaluation"), byte_tokenizer(), seqlen=8, most=101)
    told: list[int] = []
    with Engine(Decoder.open(folder), device="cpu") as engine:
        perplexity_of_model(engine, windows.ids, told.append)
    assert told == [0, 50, 100]
