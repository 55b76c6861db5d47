"""The data of a training job: samples of tokens with labels, cut or packed to length, and what became of them.

    data = read_training_data(config.data, tokenizer)
    data.summary.truncated_samples, data.longest      # how many were cut, and which sample needs the most memory

All tokens lie in one tensor: worker processes share it, and no Python object of it grows while they read. Which rows a
step of the optimizer sees is a matter of the seed and the step alone: epoch follows epoch without a seam, and global
batches are cut from that stream. So a run continues exactly from any step, and neither the number of processes nor the
micro-batch changes what a step sees.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from memfit.errors import InputError
from memfit.jobs.training.chunked_loss import IGNORED
from memfit.jobs.training.config import DataConfig, ScheduleConfig
from memfit.jobs.training.examples import Examples, Tokens, read_examples, source_of, tokenise


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Tokens in a sample."""

    shortest: int
    median: int
    mean: float
    percentile_95: int
    longest: int


@dataclass(frozen=True, kw_only=True)
class DataSummary:
    source: str
    origin: str
    format: str
    """text or instruction."""
    packed: bool
    rows: int
    """Read, without the empty ones."""
    empty_rows: int = 0
    samples: int
    tokens: int
    learned_tokens: int
    truncated_samples: int = 0
    """Cut at max_seq_len, or in pieces."""
    dropped_samples: int = 0
    """Too long, or with nothing of the answer left."""
    tokens_left_out: int = 0
    max_seq_len: int
    lengths: Lengths

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def in_lines(self) -> list[str]:
        how = "packed" if self.packed else "padded to the longest of a batch"
        lines = [
            f"data: {self.samples:,} samples of {self.rows:,} rows from {self.origin} ({self.format}, {how})",
            f"tokens: {self.tokens:,}, of which {self.learned_tokens:,} are learned",
        ]
        if not self.packed:
            each = self.lengths
            lines.append(
                f"lengths: {each.shortest:,} to {each.longest:,}, median {each.median:,}, mean {each.mean:,.1f}, "
                f"95 % up to {each.percentile_95:,}"
            )
        if self.truncated_samples or self.dropped_samples:
            lines.append(
                f"max_seq_len {self.max_seq_len:,}: {self.truncated_samples:,} rows cut, {self.dropped_samples:,} "
                f"dropped, {self.tokens_left_out:,} tokens left out"
            )
        elif self.tokens_left_out:
            lines.append(f"left out: {self.tokens_left_out:,} tokens at the end, too few for a full sample")
        if self.empty_rows:
            lines.append(f"left out: {self.empty_rows:,} empty rows")
        return lines


class TrainingData(Dataset[dict[str, Tensor]]):
    def __init__(self, ids: Tensor, learned: Tensor, starts: Tensor, *, packed: bool, summary: DataSummary) -> None:
        self._ids, self._learned, self._starts = ids, learned, starts
        self.packed, self.summary = packed, summary

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """`input_ids` and `labels`; a label is the token at the same place, or -100."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        piece = slice(int(self._starts[index]), int(self._starts[index + 1]))
        ids = self._ids[piece].long()
        return {"input_ids": ids, "labels": ids.masked_fill(~self._learned[piece], IGNORED)}

    @property
    def lengths(self) -> Tensor:
        return self._starts.diff()

    @property
    def longest(self) -> int:
        """The sample that needs the most memory; of several, the first."""
        return int(self.longest_first()[0])

    def longest_first(self) -> Tensor:
        return self.lengths.argsort(descending=True, stable=True)

    @property
    def highest_id(self) -> int:
        return int(self._ids.max())

    @property
    def fingerprint(self) -> str:
        """Two runs with the same one have learned from the same samples."""
        digest = hashlib.sha256()
        for tensor in (self._ids, self._learned, self._starts):
            digest.update(tensor.contiguous().numpy().tobytes())
        return digest.hexdigest()


def read_training_data(config: DataConfig, tokenizer: Any) -> TrainingData:
    examples = read_examples(config)
    packed = not examples.instruction if config.packing is None else config.packing
    tokens = list(tokenise(examples, config, tokenizer))
    cut = _pack(tokens, config, examples) if packed else _cut(tokens, config, examples)
    ids, learned, starts = _flat(cut.samples)
    if packed:
        full = len(ids) - cut.left_out
        ids, learned, starts = ids[:full], learned[:full], torch.arange(0, full + 1, config.max_seq_len)
        if not learned.any():
            raise _nothing_learned(tokens, config.max_seq_len, examples)
    summary = _summary(config, examples, cut, learned, starts, packed)
    return TrainingData(ids, learned, starts, packed=packed, summary=summary)


def rows_of_full_length(config: DataConfig) -> TrainingData:
    """For a plan, where the data cannot be read here: one row, as long as rows may be."""
    long, source = config.max_seq_len, config.source or ""
    packed = config.format != "instruction" if config.packing is None else config.packing
    ids = torch.zeros(long, dtype=torch.int32)
    return made_up_rows(ids, [long], packed=packed, source=source, origin=source, format=config.format)


def made_up_rows(
    ids: Tensor, lengths: list[int], *, packed: bool, source: str, origin: str, format: str
) -> TrainingData:
    """Rows of these lengths, the longest first, of which everything is learned."""
    longest, tokens = lengths[0], sum(lengths)
    summary = DataSummary(
        packed=packed, rows=len(lengths), samples=len(lengths), tokens=tokens, learned_tokens=tokens,
        max_seq_len=longest, source=source, origin=origin, format=format,
        lengths=Lengths(
            shortest=lengths[-1], median=lengths[-1], mean=tokens / len(lengths), percentile_95=longest,
            longest=longest,
        ),
    )  # fmt: skip
    starts = torch.tensor([0, *lengths]).cumsum(0)
    return TrainingData(ids, torch.ones(tokens, dtype=torch.bool), starts, packed=packed, summary=summary)


# -- to length ---------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class _Cut:
    samples: list[Tokens]
    truncated: int = 0
    dropped: int = 0
    left_out: int = 0


def _cut(tokens: list[Tokens], config: DataConfig, examples: Examples) -> _Cut:
    """One row a sample; what is longer than max_seq_len is cut, dropped or split."""
    longest, made = config.max_seq_len, _Cut(samples=[])
    if config.too_long != "split" and all(len(each.ids) > longest for each in tokens):
        raise _all_too_long(tokens, longest, examples)
    for each in tokens:
        pieces = list(_pieces(each, config))
        if len(each.ids) > longest and pieces:
            made.truncated += 1
        if not pieces:
            made.dropped += 1
        made.left_out += len(each.ids) - sum(len(piece.ids) for piece in pieces)
        made.samples += pieces
    if not made.samples:
        raise _nothing_learned(tokens, longest, examples)
    return made


def _pieces(tokens: Tokens, config: DataConfig) -> Iterator[Tokens]:
    longest = config.max_seq_len
    if len(tokens.ids) <= longest:
        whole = [tokens]
    elif config.too_long == "drop":
        whole = []
    elif config.too_long == "truncate":
        whole = [Tokens(tokens.ids[:longest], min(tokens.unlearned, longest))]
    else:
        whole = [
            Tokens(tokens.ids[start : start + longest], min(longest, max(0, tokens.unlearned - start)))
            for start in range(0, len(tokens.ids), longest)
        ]
    # The first token has nothing before it from which it could be learned.
    yield from (piece for piece in whole if len(piece.ids) > max(1, piece.unlearned))


def _nothing_learned(tokens: list[Tokens], longest: int, examples: Examples) -> InputError:
    shortest = min(each.unlearned for each in tokens)
    return InputError(
        f"{examples.origin}: nothing to learn is left of its {len(tokens):,} samples at max_seq_len {longest:,}",
        hint=f"the shortest prompt alone has {shortest:,} tokens" if shortest else None,
    )


def _all_too_long(tokens: list[Tokens], longest: int, examples: Examples) -> InputError:
    lengths = sorted(len(each.ids) for each in tokens)
    what = f"all {len(tokens):,} samples are" if len(tokens) > 1 else "its one sample is"
    span = f"{lengths[0]:,} to {lengths[-1]:,} tokens" if len(tokens) > 1 else f"{lengths[0]:,} tokens"
    return InputError(
        f"{examples.origin}: {what} longer than max_seq_len {longest:,} ({span})",
        hint="packing: true or too_long: split uses all of the text; or a larger max_seq_len",
    )


def _pack(tokens: list[Tokens], config: DataConfig, examples: Examples) -> _Cut:
    """All of the text as one, cut to full length. Rows that share a sample can see one another, as usual in packing."""
    count = sum(len(each.ids) for each in tokens)
    if count < config.max_seq_len:
        raise InputError(
            f"{examples.origin}: {count:,} tokens are too few for one sample of max_seq_len {config.max_seq_len:,}",
            hint=f"max_seq_len: {max(2, count // 2)}, or packing: false, or more text",
        )
    return _Cut(samples=tokens, left_out=count % config.max_seq_len)


def _flat(samples: list[Tokens]) -> tuple[Tensor, Tensor, Tensor]:
    whole = array("i")
    for each in samples:
        whole.extend(each.ids)
    ids = torch.frombuffer(whole, dtype=torch.int32)
    lengths = torch.tensor([0, *(len(each.ids) for each in samples)])
    starts = lengths.cumsum(0)
    learned = torch.ones(len(ids), dtype=torch.bool)
    for start, each in zip(starts.tolist(), samples, strict=False):
        learned[start : start + each.unlearned] = False
    return ids, learned, starts


def _summary(
    config: DataConfig, examples: Examples, cut: _Cut, learned: Tensor, starts: Tensor, packed: bool
) -> DataSummary:
    lengths = starts.diff().sort().values
    return DataSummary(
        source=source_of(config),
        origin=examples.origin,
        format="instruction" if examples.instruction else "text",
        packed=packed,
        rows=len(examples.rows),
        empty_rows=examples.empty,
        samples=len(lengths),
        tokens=int(lengths.sum()),
        learned_tokens=int(learned.sum()),
        truncated_samples=cut.truncated,
        dropped_samples=cut.dropped,
        tokens_left_out=cut.left_out,
        max_seq_len=config.max_seq_len,
        lengths=_lengths(lengths),
    )


def _lengths(ordered: Tensor) -> Lengths:
    last = len(ordered) - 1
    return Lengths(
        shortest=int(ordered[0]),
        median=int(ordered[last // 2]),
        mean=float(ordered.double().mean()),
        percentile_95=int(ordered[last * 95 // 100]),
        longest=int(ordered[-1]),
    )


class Collator:
    """Samples as a batch: filled up on the right to the longest of them, and what fills up is never learned."""

    def __init__(self, pad_id: int, *, mask: bool = True) -> None:
        self.pad_id, self.mask = pad_id, mask

    def __call__(self, samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        ids, labels = ([each[name] for each in samples] for name in ("input_ids", "labels"))
        batch = {"input_ids": pad_sequence(ids, True, self.pad_id), "labels": pad_sequence(labels, True, IGNORED)}
        if self.mask:
            batch["attention_mask"] = pad_sequence([torch.ones_like(each) for each in ids], True, 0)
        return batch


@lru_cache(maxsize=2)  # step after step asks for the same one
def epoch_order(samples: int, *, seed: int, epoch: int, shuffle: bool = True) -> Tensor:
    """Every sample once."""
    if not shuffle:
        return torch.arange(samples)
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % (1 << 63))
    return torch.randperm(samples, generator=generator)


def rows_of_step(step: int, *, samples: int, global_batch_size: int, seed: int, shuffle: bool = True) -> Tensor:
    """The rows of one step, the first step being 0; a process takes its equal share of them, in order of rank."""
    position, end = step * global_batch_size, (step + 1) * global_batch_size
    pieces = []
    while position < end:
        epoch, start = divmod(position, samples)
        stop = min(samples, start + end - position)
        pieces.append(epoch_order(samples, seed=seed, epoch=epoch, shuffle=shuffle)[start:stop])
        position += stop - start
    return torch.cat(pieces)


def total_steps(schedule: ScheduleConfig, *, samples: int, global_batch_size: int) -> int:
    """By epochs, the last batch is filled from the epoch after."""
    if schedule.max_steps is not None:
        return schedule.max_steps
    return max(1, math.ceil((schedule.epochs or 1.0) * samples / global_batch_size))
