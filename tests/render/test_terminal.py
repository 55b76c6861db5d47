"""The report of a plan, as text: the document is written here, and so is every line that it becomes."""

from __future__ import annotations

import copy
import io
from textwrap import dedent
from typing import Any

import pytest
from rich.console import Console

from memfit.render.plan import as_text, show_plan

GiB = 1 << 30

PLAN: dict[str, Any] = {
    "schema": "memfit.plan/1",
    "id": None,
    "workload": {
        "kind": "train", "model": "small", "batch_size": 4, "seq_len": 128, "precision": "bf16", "attention": "sdpa",
        "optimizer": "adamw", "grad_checkpointing": False, "grad_accum": 1, "clip_grad": True,
        "target_modules": ["q", "v"], "alloc_conf": "", "gpu": "12GiB",
    },
    "model": {"name": "small", "parameters": 1_234_000_000, "trainable_parameters": 56_000_000},
    "gpu": {"name": "RTX 1", "capacity_bytes": 12 * GiB},
    "peak": {
        "allocated_bytes": 8 * GiB, "reserved_bytes": 9 * GiB, "context_bytes": GiB // 2,
        "device_bytes": 9 * GiB + GiB // 2,
    },
    "at_peak": {"phase": "backward", "step": 2, "module": "model.head", "op": "aten._log_softmax.default"},
    "breakdown": {
        "weights": 4 * GiB, "gradients": 0, "optimizer": 2 * GiB, "activations": 2 * GiB - 1024, "loss": 0,
        "kv_cache": 0, "temporaries": 0, "workspaces": 0, "other": 1024,
    },
    "phases": [
        {"name": "load", "step": 0, "allocated_bytes": 4 * GiB, "reserved_bytes": 4 * GiB},
        {"name": "forward", "step": 1, "allocated_bytes": 5 * GiB, "reserved_bytes": 6 * GiB},
        {"name": "backward", "step": 1, "allocated_bytes": 6 * GiB, "reserved_bytes": 7 * GiB},
        {"name": "forward", "step": 2, "allocated_bytes": 7 * GiB, "reserved_bytes": 9 * GiB},
        {"name": "backward", "step": 2, "allocated_bytes": 8 * GiB, "reserved_bytes": 9 * GiB},
        {"name": "forward", "step": 3, "allocated_bytes": 7 * GiB, "reserved_bytes": 9 * GiB},
        {"name": "backward", "step": 3, "allocated_bytes": 8 * GiB, "reserved_bytes": 9 * GiB},
    ],
    "verdict": "safe",
    "headroom_bytes": 2 * GiB + GiB // 2,
    "smallest_gpu_bytes": 9 * GiB,
    "largest": [
        {"category": "weights", "module": "model.layers.*.mlp.weight", "op": "aten.empty_like.default", "count": 1200,
         "allocated_bytes": 3 * GiB},
        {"category": "optimizer", "module": "", "op": "aten.zeros_like.default", "count": 24,
         "allocated_bytes": 2 * GiB},
        {"category": "activations", "module": "model.head", "op": "aten._log_softmax.default", "count": 1,
         "allocated_bytes": GiB},
    ],
    "notes": ["predicted, not measured", "pip install 'memfit[web]' [bold]is not markup[/bold]"],
    "seconds": 1.5,
}  # fmt: skip


def plan(**changes: Any) -> dict[str, Any]:
    """Dotted names change what is inside: `peak__device_bytes=1`."""
    made = copy.deepcopy(PLAN)
    for path, value in changes.items():
        *outer, last = path.split("__")
        place = made
        for name in outer:
            place = place[name]
        place[last] = value
    return made


def plan_text(document: dict[str, Any], *, width: int = 100) -> str:
    return as_text(show_plan, document, width=width)


def test_the_whole_report_at_eighty_columns() -> None:
    assert plan_text(PLAN, width=80) == dedent("""\
        safe: 9.50 GiB of 12.00 GiB, 2.50 GiB to spare
          most is held in backward of step 2: 8.00 GiB of tensors (50.0 % weights);
          torch reserves up to 9.00 GiB, CUDA itself takes 0.50 GiB

        memory
          ████████████████████████████████████████████████████▓▓▓▓▓▓▒▒▒▒················
          █  allocated   8.00 GiB  tensors that are alive, at their peak
          ▓  reserved    9.00 GiB  what torch's allocator holds for them, at its peak
          ▒  context     0.50 GiB  CUDA itself
             device      9.50 GiB  reserved and context: what nvidia-smi shows
             at least    9.00 GiB  the smallest card it runs on; there torch gives back
                                   what is idle
          ·  card       12.00 GiB  RTX 1

        alive at the peak: 8.00 GiB (just made: _log_softmax in model.head)
          weights      ██████████████████                      4.00 GiB  50.0 %
          optimizer    █████████                               2.00 GiB  25.0 %
          activations  █████████                               2.00 GiB  25.0 %
          other        ▏                                     < 0.01 GiB   0.0 %

        phases
                               allocated  reserved
          start      load       4.00 GiB  4.00 GiB
          step 1     forward    5.00 GiB  6.00 GiB
                     backward   6.00 GiB  7.00 GiB
          steps 2-3  forward    7.00 GiB  9.00 GiB
                     backward   8.00 GiB  9.00 GiB  ◀ peak

        largest at the peak, by module and op
          3.00 GiB  37.5 %  1,200 x  weights      model.layers.*.mlp.weight
          2.00 GiB  25.0 %     24 x  optimizer    zeros_like
          1.00 GiB  12.5 %      1 x  activations  model.head  _log_softmax

        the job
          train of small: 1.23 billion parameters, 56 million trained
          batch-size 4, seq-len 128, precision bf16, attention sdpa, optimizer adamw,
          grad-accum 1, clip-grad, target-modules q v

        assumed
          - predicted, not measured
          - pip install 'memfit[web]' [bold]is not markup[/bold]

        next: nothing to change""")


def test_what_fails_says_how_much_is_missing_and_what_to_try() -> None:
    text = plan_text(plan(verdict="fails", gpu__capacity_bytes=6 * GiB, headroom_bytes=-3 * GiB))
    assert text.startswith("fails: needs 9.00 GiB, has 6.00 GiB: 3.00 GiB too little\n")
    assert text.endswith(
        "next: a card with 9.00 GiB or more, or `memfit fit train` with these flags: the smallest change that\n"
        "makes it fit"
    )


def test_no_setting_is_proposed_where_the_weights_alone_are_too_much() -> None:
    text = plan_text(plan(verdict="fails", gpu__capacity_bytes=4 * GiB, headroom_bytes=-5 * GiB))
    assert text.endswith("next: a card with 9.00 GiB or more, or a smaller model: the weights alone take 4.00 GiB")


def test_a_job_that_only_fits_by_giving_memory_back_is_shown_with_what_it_takes_then() -> None:
    tight = plan(verdict="tight", gpu__capacity_bytes=9 * GiB + GiB // 4, headroom_bytes=GiB // 8)
    assert plan_text(tight).startswith("tight: 9.12 GiB of 9.25 GiB, 0.12 GiB to spare\n")


def test_without_a_card_there_is_no_verdict_but_a_way_to_ask_for_one() -> None:
    text = plan_text(plan(verdict=None, gpu=None, headroom_bytes=None))
    assert text.startswith("no verdict: 9.50 GiB at the peak, no card named\n")
    assert "  card" not in text
    assert "--gpu 24GB" in text.splitlines()[-1]


def test_a_card_that_is_only_a_size_is_not_named_twice() -> None:
    assert "card       12.00 GiB  as given" in plan_text(plan(gpu__name="12.00 GiB"))


def test_ones_own_code_is_not_offered_flags() -> None:
    own = plan(verdict="tight", headroom_bytes=0, workload={"kind": "own-code", "function": "step", "alloc_conf": ""})
    assert plan_text(own).endswith("next: keep other programs off the card")


def test_an_estimated_context_is_a_range_and_a_measured_one_a_figure() -> None:
    estimated, measured = plan_text(plan(context={"low_bytes": GiB // 4})), plan_text(plan())

    assert "CUDA itself takes 0.25 GiB to 0.50 GiB (estimated: the upper end counts)" in " ".join(estimated.split())
    assert "CUDA itself, estimated: 0.25 GiB at the least" in estimated
    assert "CUDA itself takes 0.50 GiB" in " ".join(measured.split()) and "estimated" not in measured


def test_of_many_different_steps_the_first_the_last_and_the_peak_are_shown() -> None:
    phases = [
        {"name": "forward", "step": step, "allocated_bytes": step * GiB, "reserved_bytes": step * GiB}
        for step in range(1, 21)
    ]
    text = plan_text(plan(phases=phases, at_peak__phase="forward", at_peak__step=10))
    shown = [line.split()[:2] for line in text.partition("phases\n")[2].partition("\n\n")[0].splitlines()[1:]]
    steps = [
        ["step", "1"],
        ["step", "2"],
        ["step", "3"],
        ["step", "4"],
        ["..."],
        ["step", "10"],
        ["..."],
        ["step", "20"],
    ]
    assert shown == steps


def test_nothing_at_all_can_still_be_shown() -> None:
    nothing = plan(
        breakdown={"weights": 0, "activations": 0}, phases=[], largest=[], notes=[],
        peak={"allocated_bytes": 0, "reserved_bytes": 0, "context_bytes": 0, "device_bytes": 0},
        at_peak={"phase": "", "step": 0, "module": "", "op": ""}, workload={},
    )  # fmt: skip
    text = plan_text(nothing)
    assert "most is held in the traced code: 0.00 GiB" in text
    assert "phases" not in text


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    assert max(map(len, plan_text(PLAN, width=width).splitlines())) <= min(width, 120)


def test_names_from_elsewhere_are_neither_markup_nor_control_characters() -> None:
    hostile = "[red]x[/red]\x1b[2J\r[link=evil]"
    text = plan_text(plan(model__name=hostile, at_peak__module=hostile, notes=[hostile], largest=[
        {"category": hostile, "module": hostile, "op": hostile, "count": 1, "allocated_bytes": 1}
    ]), width=120)  # fmt: skip
    assert "\x1b" not in text
    assert "\r" not in text
    assert text.count("[red]x[/red]\\x1b[2J\\r[link=evil]") >= 4


def coloured(document: dict[str, Any], **options: Any) -> str:
    out = io.StringIO()
    show_plan(document, Console(file=out, width=80, force_terminal=True, legacy_windows=False, **options))
    return out.getvalue()


def test_colour_says_nothing_that_words_do_not() -> None:
    import re

    text = re.sub(r"\x1b\[[0-9;]*m", "", coloured(PLAN, color_system="standard"))
    assert "\n".join(line.rstrip() for line in text.splitlines()) == plan_text(PLAN, width=80)


def test_no_color_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    colour = "\x1b[34m"
    assert colour in coloured(PLAN, color_system="standard")
    monkeypatch.setenv("NO_COLOR", "1")
    assert colour not in coloured(PLAN, color_system="standard")


def test_an_output_without_block_characters_gets_plain_ones() -> None:
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii")
    show_plan(PLAN, Console(file=out, width=80, color_system=None))
    out.flush()
    text = raw.getvalue().decode("ascii")
    assert "####" in text
    assert "< peak" in text
