"""Whether the model has a position for every token of a sequence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from memfit.advice.preflight.finding import CannotTell, Finding, Line
from memfit.advice.preflight.situation import Situation

POSITIONS = Line("config", "positions")
ROTARY = ("rope_parameters", "rope_theta", "rope_scaling")
"""Settings of positions that are computed: such a model runs past them, and was never taught what they mean."""


def positions(situation: Situation) -> Iterator[Finding]:
    from memfit.jobs.training.shapes import POSITIONS as NAMES
    from memfit.jobs.training.shapes import number_in

    shape = shape_of(situation)
    most = number_in(dict(shape), NAMES)
    wanted, said, setting = _wanted(situation)
    if most is None:
        yield POSITIONS.skipped("this model does not say how many positions it has")
    elif wanted <= most:
        yield POSITIONS.ok(f"{said}, of {most:,} positions that the model has", positions=most)
    else:
        runs_on = not situation.asked.trains and any(shape.get(name) for name in ROTARY)
        status = POSITIONS.warning if runs_on else POSITIONS.failed
        yield status(f"{said}, and the model has {most:,} positions", setting.format(most), positions=most)


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
