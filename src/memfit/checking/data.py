"""The data: readable, its lengths, padding and what of it is learned; tokenizer, positions, calibration text."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from memfit.checking.situation import MOST_ROWS, CannotTell, Finding, Line, Situation
from memfit.errors import InputError
from memfit.models.files import NotHere

if TYPE_CHECKING:
    from memfit.jobs.training.data import TrainingData


CALIBRATION = Line("config", "calibration data")


def check_calibration(situation: Situation) -> Finding:
    from memfit.jobs.texts import check_packages, find_texts, is_on_this_machine

    workload = situation.asked.workload
    if workload is None or not workload.looks_at_inputs:
        raise CannotTell("nothing is calibrated")
    name = workload.dataset
    try:
        check_packages(name)
        if not is_on_this_machine(name):
            raise CannotTell(f"{name} is on the Hub, which a look does not ask")
        texts = find_texts(name, "calibration")
    except InputError as error:
        return (CALIBRATION.failed if situation.runs_here else CALIBRATION.warning)(error.message, error.hint)
    return CALIBRATION.ok(f"{len(texts.documents):,} documents of {texts.name} from {texts.origin}")


TOKENIZER = Line("model", "tokenizer")


def check_tokenizer(situation: Situation) -> Finding:
    model = situation.config.model
    named = model.tokenizer or model.name
    try:
        found = situation.tokenizer.get()
    except NotHere as error:
        if model.tokenizer is None and not model.starts_from_scratch:
            raise CannotTell("it comes with the weights, which are not here") from error
        advice = f"`hf download {error.hub_id} --include 'tokenizer*'`, or give a folder"
        return TOKENIZER.warning(error.message, advice)
    own = None if model.tokenizer is None else situation.own_tokenizer
    if own is not None and _words(own) != _words(found):
        return TOKENIZER.warning(
            f"{named} is not the tokenizer of {model.name}: its tokens mean other words to those weights",
            "leave model.tokenizer out; or from_scratch: true trains weights for it",
        )
    return TOKENIZER.ok(f"of {named}, {len(_words(found)):,} tokens")


def _words(found: Any) -> dict[str, int]:
    """Each token and its number; of one token a byte, their number stands for all."""
    if hasattr(found, "get_vocab"):
        words: dict[str, int] = found.get_vocab()
        return words
    return {str(number): number for number in range(len(found))}


POSITIONS = Line("config", "positions")
ROTARY = ("rope_parameters", "rope_theta", "rope_scaling")
"""Settings of positions that are computed: such a model runs past them, and was never taught what they mean."""


def check_positions(situation: Situation) -> Finding:
    from memfit.jobs.training.shapes import POSITIONS as NAMES
    from memfit.jobs.training.shapes import number_in

    shape = shape_of(situation)
    most = number_in(dict(shape), NAMES)
    wanted, said, setting = _wanted(situation)
    if most is None:
        return POSITIONS.skipped("this model does not say how many positions it has")
    if wanted <= most:
        return POSITIONS.ok(f"{said}, of {most:,} positions that the model has", positions=most)
    runs_on = not situation.asked.trains and any(shape.get(name) for name in ROTARY)
    status = POSITIONS.warning if runs_on else POSITIONS.failed
    return status(f"{said}, and the model has {most:,} positions", setting.format(most), positions=most)


def _wanted(situation: Situation) -> tuple[int, str, str]:
    """How many, in words, and the setting that would take no more."""
    work = situation.asked.workload
    if work is None:
        length = situation.config.data.max_seq_len
        return length, f"{length:,} tokens a sample", "max_seq_len: {}"
    if work.kind != "generate":
        return work.seq_len, f"{work.seq_len:,} tokens a sample", "--seq-len {}"
    both = work.seq_len + work.new_tokens
    said = f"{work.seq_len:,} tokens and {work.new_tokens:,} new ones"
    return both, said, "--seq-len and --new-tokens of {} together"


def shape_of(situation: Situation) -> Mapping[str, Any]:
    """The settings of the model's architecture, where it has any."""
    work = situation.asked.workload
    if situation.asked.trains or work is None:
        settings: Any = getattr(situation.shapes.needed(), "config", None)
    else:
        from memfit.models.registry import load_config, resolve

        source = resolve(work.model)
        settings = None if source.kind == "factory" else load_config(source)
    if not hasattr(settings, "to_dict"):
        raise CannotTell("this model is its own code, which does not say")
    shape: dict[str, Any] = settings.to_dict()
    return shape


READABLE, LENGTHS = Line("config", "data"), Line("config", "lengths")
PADDING, LABELS = Line("config", "padding"), Line("config", "labels")
VOCABULARY = Line("config", "vocabulary")
MUCH = 0.5
"""The share of cut samples, or of padding in a batch, from which on it is worth a warning."""
MEASURED_ROWS = 2_000
FILES = "data.source: a file in UTF-8 that holds text: .txt, .jsonl, .json or .parquet, or a folder of these"
STRAY_SHARE = 0.01
"""Of the learned tokens, that may be padding inside the data before it is worth a word."""


def check_readable(situation: Situation) -> Finding:
    try:
        examples = situation.examples.get()
    except InputError as error:
        return READABLE.failed(error.message, error.hint or FILES)
    kind = "prompts with answers" if examples.instruction else "text"
    count = len(examples.rows)
    first = f"the first {count:,} rows" if count == MOST_ROWS else f"{count:,} rows"
    empty = f", {examples.empty:,} empty ones left out" if examples.empty else ""
    return READABLE.ok(f"{first} of {kind} from {examples.origin}{empty}", rows=count, empty_rows=examples.empty)


def check_lengths(situation: Situation) -> Finding:
    data, config = situation.data.get(), situation.config.data
    summary, rows = data.summary, row_lengths(situation)
    details: dict[str, Any] = {
        **rows, "samples": len(data), "longest_sample": summary.lengths.longest,
        "truncated_share": _share(summary.truncated_samples, summary.rows),
    }  # fmt: skip
    spread = (
        f"rows of {rows['shortest']:,} to {rows['longest']:,} tokens, median {rows['median']:,}, 95 % up to"
        f" {rows['percentile_95']:,}"
    )
    if data.packed:
        return LENGTHS.ok(f"{spread}; packed to {len(data):,} samples of {config.max_seq_len:,}", **details)
    found = f"{spread}; max_seq_len {config.max_seq_len:,} cuts {summary.truncated_samples:,} of {summary.rows:,} rows"
    if summary.dropped_samples:
        found += f" and drops {summary.dropped_samples:,} with nothing left to learn"
    if summary.truncated_samples + summary.dropped_samples > MUCH * summary.rows:
        keeps = f"max_seq_len: {rows['percentile_95']} keeps 95 % of them whole"
        return LENGTHS.warning(found, f"{keeps}; or too_long: split, or packing: true", **details)
    return LENGTHS.ok(found, **details)


def row_lengths(situation: Situation) -> dict[str, int]:
    """Of the rows as they are, before anything is cut or packed."""
    from memfit.jobs.training.examples import tokenise

    examples, tokenizer = situation.examples.needed(), situation.tokenizer.needed()
    few = dataclasses.replace(examples, rows=examples.rows[:MEASURED_ROWS])
    found = sorted(len(each.ids) for each in tokenise(few, situation.config.data, tokenizer))
    last = len(found) - 1
    return {
        "shortest": found[0], "median": found[last // 2], "percentile_95": found[last * 95 // 100], "longest": found[-1]
    }  # fmt: skip


def check_vocabulary(situation: Situation) -> Finding:
    """A token that the model has no row for stops a run on the GPU with an assertion that names nothing."""
    from memfit.jobs.training.shapes import VOCABULARY as NAMES
    from memfit.jobs.training.shapes import number_in

    words, highest = number_in(dict(shape_of(situation)), NAMES), situation.data.needed().highest_id
    if words is None:
        return VOCABULARY.skipped("this model does not say how many tokens it knows")
    if highest >= words:
        found = f"token {highest:,} is in the data, and the model knows {words:,} tokens"
        return VOCABULARY.failed(found, "model.tokenizer is not the one of this model", highest=highest, words=words)
    return VOCABULARY.ok(f"tokens up to {highest:,} in the data, of {words:,} that the model knows")


def check_padding(situation: Situation) -> Finding:
    data, config = situation.data.needed(), situation.config
    if data.packed:
        return PADDING.ok("none: samples are packed to full length")
    rows = situation.batch.needed().micro_batch_size
    wasted = padding_share(data, rows, seed=config.seed, shuffle=config.data.shuffle)
    to_the_limit = 1 - data.summary.lengths.mean / config.data.max_seq_len
    found = (
        f"{wasted:.0%} of a batch, for rows are padded to the longest of their micro-batch;"
        f" padded to max_seq_len it would be {to_the_limit:.0%}"
    )
    details: dict[str, Any] = {"padding_share": wasted, "padding_share_at_max_length": to_the_limit}
    if wasted > MUCH:
        return PADDING.warning(found, "packing: true, or a smaller micro_batch_size", **details)
    return PADDING.ok(found, **details)


def padding_share(data: TrainingData, rows: int, *, seed: int, shuffle: bool) -> float:
    """Of the first epoch, in the order in which it will be seen."""
    from memfit.jobs.training.data import epoch_order

    lengths = data.lengths[epoch_order(len(data), seed=seed, epoch=0, shuffle=shuffle)]
    full = lengths[: len(lengths) // rows * rows].reshape(-1, rows) if len(lengths) >= rows else lengths[None]
    computed = int(full.max(dim=1).values.sum()) * full.shape[1]
    return 1 - int(full.sum()) / computed


def check_labels(situation: Situation) -> Finding:
    """Padding is masked in a real batch, every sample has something to learn, and what is learned is not padding."""
    from memfit.jobs.training.chunked_loss import IGNORED
    from memfit.jobs.training.data import Collator
    from memfit.jobs.training.examples import pad_id_of

    data, tokenizer = situation.data.needed(), situation.tokenizer.needed()
    pad, summary = pad_id_of(tokenizer), data.summary
    order = data.longest_first()
    samples = [data[int(order[0])], data[int(order[-1])]]
    batch = Collator(pad, mask=not data.packed)(samples)
    filled = len(samples[1]["input_ids"])
    if bool((batch["labels"][1, filled:] != IGNORED).any()):
        return LABELS.failed("padding is learned: its labels are not masked", "labels of padding must be -100")
    stray = stray_padding(data, pad)
    details: dict[str, Any] = {
        "learned_tokens": summary.learned_tokens, "tokens": summary.tokens, "padding_in_the_data": stray,
        "dropped_samples": summary.dropped_samples,
    }  # fmt: skip
    if stray > STRAY_SHARE * summary.learned_tokens:
        token = f"{pad}" if not hasattr(tokenizer, "decode") else f"{pad} ({tokenizer.decode([pad])!r})"
        return LABELS.failed(
            f"{_share(stray, summary.learned_tokens):.0%} of what is learned is padding inside the data: token {token}"
            f" {stray:,} times",
            "take the padding out of the file: memfit pads by itself, and masks it",
            **details,
        )
    share = f"{summary.learned_tokens:,} of {summary.tokens:,} tokens are learned, at least one in each sample"
    if summary.format == "instruction" and not situation.config.data.mask_prompt:
        return LABELS.warning(f"{share}; the prompts too", "mask_prompt: true learns the answers alone", **details)
    masked = "prompts and padding are masked" if summary.format == "instruction" else "padding is masked"
    return LABELS.ok(f"{share}; {masked}", **details)


def stray_padding(data: TrainingData, pad: int) -> int:
    """Learned tokens that fill up rather than end a text: a repetition of the padding token."""
    count = 0
    for index in range(len(data)):
        learned = data[index]["labels"]
        count += int(((learned[1:] == pad) & (learned[:-1] == pad)).sum())
    return count


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
