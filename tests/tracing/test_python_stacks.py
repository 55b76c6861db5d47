"""Lines of code of what is traced: as torch's recorder has them, kept only where somebody asks."""

from __future__ import annotations

import inspect
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from memfit.analysis.run import open_run, run_of_trace
from memfit.cli.main import main
from memfit.errors import InputError
from memfit.events import Trace
from memfit.planning.own_code import trace_own_code
from memfit.planning.predict import predict
from memfit.snapshots.read import snapshot_of
from memfit.tracing.python_stacks import keeping_stacks
from memfit.tracing.tracer import Tracer, trace

HERE = __file__


class Doubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.inner(x)
        half = made[:4]
        return torch.exp(half)


def line_of(text: str) -> int:
    lines, first = inspect.getsourcelines(Doubled)
    return first + next(i for i, line in enumerate(lines) if text in line)


def step(tracer: Tracer) -> None:
    model = Doubled().to(tracer.device)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(8, 64, device=tracer.device)).sum().backward()
    optimizer.step()


def lines_of(made: Trace, op: str) -> set[tuple[str, int, str]]:
    """Of the blocks that an op has made, the innermost frame outside torch."""
    found = set()
    for block in range(len(made.requested)):
        if made.op(block) == op:
            frames = [frame for frame in made.stack(block) if "/torch/" not in frame[0]]
            found.add(frames[0] if frames else ("", 0, ""))
    return found


@pytest.fixture(scope="module")
def kept() -> Trace:
    with keeping_stacks():
        return trace(step)


def test_nothing_is_kept_unasked() -> None:
    made = trace(step)
    assert (len(made.stack_of), made.stacks, made.frames) == (0, [()], [])


def test_keeping_stacks_changes_no_event(kept: Trace) -> None:
    plain = trace(step)
    for column in ("actions", "subjects", "requested", "streams"):
        assert getattr(plain, column) == getattr(kept, column)


def test_what_the_forward_pass_makes_has_the_line_that_asked_for_it(kept: Trace) -> None:
    assert lines_of(kept, "aten.exp.default") == {(HERE, line_of("torch.exp"), "forward")}
    assert (HERE, line_of("self.inner(x)"), "forward") in lines_of(kept, "aten.addmm.default")


def test_a_stack_goes_from_the_op_out_to_the_traced_function_and_not_beyond(kept: Trace) -> None:
    block = next(b for b in range(len(kept.requested)) if kept.op(b) == "aten.addmm.default")
    names = [name for _, _, name in kept.stack(block)]
    assert names[0] == "forward"  # of nn.Linear
    assert names[-1] == "step"
    assert not any("memfit/tracing" in file for file, _, _ in kept.frames)


def test_what_the_backward_pass_makes_has_the_line_of_the_forward_pass_it_belongs_to(kept: Trace) -> None:
    assert lines_of(kept, "aten.mul.Tensor") == {(HERE, line_of("torch.exp"), "backward of forward")}
    assert (HERE, line_of("self.inner(x)"), "backward of forward") in lines_of(kept, "aten.mm.default")


def test_what_comes_of_a_view_has_the_line_of_the_view(kept: Trace) -> None:
    assert lines_of(kept, "aten.slice_backward.default") == {(HERE, line_of("made[:4]"), "backward of forward")}


def test_what_the_optimizer_makes_has_the_line_of_its_step(kept: Trace) -> None:
    lines, first = inspect.getsourcelines(step)
    here = first + next(i for i, line in enumerate(lines) if "optimizer.step()" in line)
    assert lines_of(kept, "aten.zeros_like.default") == {(HERE, here, "step")}


def test_a_recomputed_block_has_the_lines_that_run_again() -> None:
    from torch.utils.checkpoint import checkpoint

    def checkpointed(tracer: Tracer) -> None:
        model = Doubled().to(tracer.device)
        x = torch.zeros(8, 64, device=tracer.device, requires_grad=True)
        checkpoint(model, x, use_reentrant=False).sum().backward()

    with keeping_stacks():
        made = trace(checkpointed)
    assert lines_of(made, "aten.exp.default") == {(HERE, line_of("torch.exp"), "forward")}


def test_stacks_are_written_and_read_again(kept: Trace, tmp_path: Path) -> None:
    kept.save(tmp_path / "t.npz")
    again = Trace.load(tmp_path / "t.npz")
    assert (again.stack_of, again.stacks, again.frames) == (kept.stack_of, kept.stacks, kept.frames)
    plain = trace(step)
    plain.save(tmp_path / "plain.npz")
    assert len(Trace.load(tmp_path / "plain.npz").stack_of) == 0


@pytest.mark.parametrize("wrong", ["stack", "frame", "length"])
def test_a_file_whose_stacks_lead_nowhere_is_refused(tmp_path: Path, wrong: str) -> None:
    made = Trace()
    made.alloc(512)
    made.stack_of.append(made.stack_id([("a.py", 1, "f")]))
    if wrong == "stack":
        made.stack_of[0] = 7
    elif wrong == "frame":
        made.stacks[1] = (5,)
    else:
        made.stack_of.append(0)
    made.save(tmp_path / "t.npz")
    with pytest.raises(InputError, match="cannot read trace"):
        Trace.load(tmp_path / "t.npz")


LLAMA = {
    "model_type": "llama", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 9,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip


@pytest.fixture
def nine_blocks(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return str(tmp_path)


@pytest.mark.parametrize("kind", ["train", "generate"])
def test_blocks_that_were_not_traced_have_the_lines_of_those_that_were(nine_blocks: str, kind: str) -> None:
    settings = {"new_tokens": 12} if kind == "generate" else {"grad_checkpointing": True}
    made = predict(kind=kind, model=nine_blocks, batch_size=1, seq_len=16, stacks=True, **settings).trace
    assert len(made.stack_of) == len(made.requested)
    by_layer: dict[int, set[tuple[str, int]]] = {layer: set() for layer in range(9)}
    for block in range(len(made.requested)):
        parts = made.module(block).split(".")
        if "layers" in parts and parts[-1] not in ("weight", "bias"):
            layer = int(parts[parts.index("layers") + 1])
            by_layer[layer].add((made.op(block), made.stack_of[block]))
    assert by_layer[1]
    assert all(by_layer[layer] == by_layer[1] for layer in range(2, 8))
    for _, stack in by_layer[4]:
        assert any("modeling_llama.py" in made.frames[i][0] for i in made.stacks[stack])


def test_a_plan_keeps_none_and_one_that_is_saved_keeps_them(nine_blocks: str, tmp_path: Path) -> None:
    asked = {"kind": "forward", "model": nine_blocks, "batch_size": 1, "seq_len": 16}
    assert len(predict(**asked).trace.stack_of) == 0  # type: ignore[arg-type]
    flags = ["--model", nine_blocks, "--batch-size", "1", "--seq-len", "16", "--save-trace", str(tmp_path / "t.npz")]
    assert main(["plan", "forward", *flags]) == 0
    assert len(Trace.load(tmp_path / "t.npz").stack_of) > 0


def test_reports_pages_and_exports_of_a_prediction_show_its_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--model-size", "small", "--context-length", "64", "--batch-size", "1", "--profile-type", "training"]
    snapshot = tmp_path / "x.pickle"
    assert main(["profile", *asked, "--device", "predict", "--measure-steps", "1", "-o", str(snapshot)]) == 0
    capsys.readouterr()
    assert main(["report", str(snapshot), "--json", "--html", str(tmp_path / "x.html")]) == 0
    document = json.loads(capsys.readouterr().out)
    assert any("models/basics.py:" in row["code_line"] for row in document["largest"])
    run = open_run(snapshot)
    assert run.labels.stacks
    scores = next(b for b in range(len(run.timeline.size)) if run.trace.op(b) == "aten.exp.default")
    assert run.labels.lines[run.labels.line[scores]].startswith("memfit/models/basics.py:")
    assert run.trace.module(scores).startswith("layers.")
    page = (tmp_path / "x.html").read_text()
    assert "memfit/models/basics.py" in page
    assert main(["export", str(snapshot), "--to", "speedscope", "-o", str(tmp_path / "flame.json")]) == 0
    frames = json.loads((tmp_path / "flame.json").read_text())["shared"]["frames"]
    assert any(frame["name"].startswith("memfit/models/basics.py:") for frame in frames)


def test_a_saved_trace_is_reported_and_exported_with_its_lines(kept: Trace) -> None:
    from memfit.analysis.export import viewer_snapshot

    run = run_of_trace(kept)
    exp = next(b for b in range(len(kept.requested)) if kept.op(b) == "aten.exp.default")
    text = f"{Path(HERE).name}:{line_of('torch.exp')} forward"
    assert run.labels.lines[run.labels.line[exp]].endswith(text)
    raw = viewer_snapshot(run)
    again = snapshot_of(raw)
    numbers = np.array([kept.op(b) == "aten.exp.default" for b in range(len(kept.requested))])
    assert numbers.any()
    found = [frame for i in range(len(again.traces[0].requested)) for frame in again.frames(0, i)]
    assert any(frame.line == line_of("torch.exp") and frame.filename == HERE for frame in found)
    assert {again.traces[0].op(b) for b in range(len(again.traces[0].requested))} >= {"aten.exp.default"}


def test_a_persons_own_code_is_traced_with_its_lines() -> None:
    def own_step() -> None:
        model = Doubled().cuda()
        model(torch.zeros(8, 64, device="cuda")).sum().backward()

    made = trace_own_code(own_step).trace
    assert lines_of(made, "aten.exp.default") == {(HERE, line_of("torch.exp"), "forward")}
    block = next(b for b in range(len(made.requested)) if made.op(b) == "aten.exp.default")
    assert made.stack(block)[-1][2] == "own_step"


def test_what_a_thread_makes_has_the_line_that_waits_for_it() -> None:
    def own_step() -> None:
        with ThreadPoolExecutor(2) as pool:
            made = pool.submit(torch.ones, 1000, device="cuda").result()
        kept = torch.zeros_like(made)
        del kept

    made = trace_own_code(own_step).trace
    block = next(b for b in range(len(made.requested)) if made.op(b) == "aten.ones.default")
    assert (HERE, inspect.getsourcelines(own_step)[1] + 2, "own_step") in made.stack(block)
