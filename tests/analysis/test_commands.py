"""`memfit report`, `diff` and `export` as they are typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from made import DATA, MiB, random_trace, save, training

from memfit.cli.main import main
from memfit.events import Trace

SNAPSHOT = str(DATA / "snap-oom.pickle")

TINY = {"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 16, "vocab_size": 64}


def ended(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = main([str(word) for word in words])
    out, err = capsys.readouterr()
    return code, out, err


def test_a_report_is_printed_and_the_exit_code_is_0(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = ended(capsys, "report", SNAPSHOT)

    assert (code, err) == (0, "")
    assert out.startswith("note: GPU 0: recording began after memory was in use")
    assert "peak: 5.76 GiB allocated, 5.99 GiB reserved (measured, GPU 0)" in out


def test_json_is_one_document_with_its_schema(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = ended(capsys, "report", SNAPSHOT, "--json")

    document = json.loads(out)
    assert (code, err, document["schema"]) == (0, "", "memfit.report/1")
    assert document["source"] == {"path": SNAPSHOT, "kind": "snapshot", "files": []}


def test_a_page_is_written_beside_the_report_and_never_over_another_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    target = tmp_path / "report.html"
    code, out, err = ended(capsys, "report", SNAPSHOT, "--html", str(target))
    assert (code, err) == (0, f"the page is {target}\n")
    assert "peak: 5.76 GiB" in out
    before = target.read_bytes()

    code, out, err = ended(capsys, "report", str(DATA / "snap-train.pickle"), "--html", str(target))

    assert (code, out) == (2, "")
    assert err == f"error: --html {str(target)!r} already exists\n  --force overwrites it\n"
    assert target.read_bytes() == before
    assert ended(capsys, "report", str(DATA / "snap-train.pickle"), "--html", str(target), "--force")[0] == 0
    assert target.read_bytes() != before
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("report", "absent.pickle"), "error: no file 'absent.pickle'\n"),
        (("report", SNAPSHOT, "--device", "3"), "error: --device 3: nothing was recorded of it\n  recorded were: 0\n"),
        (("report", SNAPSHOT, "--html", "/nowhere/x.html"), "there is no folder '/nowhere'"),
        (("report", SNAPSHOT, "--html", "/tmp"), "error: --html '/tmp' is a folder"),
        (("diff", SNAPSHOT, "absent"), "error: no file 'absent'\n"),
        (("diff", SNAPSHOT, SNAPSHOT, "--step-a", "1"), "no steps are marked in it"),
        (("export", SNAPSHOT, "--to", "vcd"), "error: no export format called 'vcd'"),
        (("export", SNAPSHOT), "missing option '--to'"),
    ],
)
def test_what_is_wrong_is_said_in_a_line_and_the_exit_code_is_2(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    code, out, err = ended(capsys, *words)

    assert (code, out) == (2, "")
    assert said in err
    assert "Traceback" not in err


def test_a_file_that_would_run_something_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "shared.pickle").write_bytes(b"\x80\x04cos\nsystem\n\x8c\x02ls\x85R.")

    code, out, err = ended(capsys, "report", str(tmp_path / "shared.pickle"))

    assert (code, out) == (2, "")
    assert "it asks Python to import os.system, which no memory snapshot needs" in err


def test_a_diff_is_printed_with_what_explains_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for name, size in (("a", 30), ("b", 42)):
        trace = Trace()
        trace.alloc(size * MiB, category="weights", op="empty")
        trace.save(tmp_path / f"{name}.npz")

    code, out, err = ended(capsys, "diff", str(tmp_path / "a.npz"), str(tmp_path / "b.npz"))
    assert (code, err) == (0, "")
    assert out.startswith("b needs 12.00 MiB more than a at the peak\n")
    assert "in all: the difference of the allocated peaks, to the byte" in out

    code, out, _ = ended(capsys, "diff", str(tmp_path / "a.npz"), str(tmp_path / "b.npz"), "--json")
    assert (code, json.loads(out)["schema"]) == (0, "memfit.diff/1")


def test_a_device_that_no_side_of_a_diff_has_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "a.npz"
    random_trace(1, events=50).save(trace)
    for device in (7, -1):
        code, _, err = ended(capsys, "diff", trace, trace, "--device", device)
        assert (code, err) == (2, f"error: --device {device}: '{trace}' is a trace of one device\n")
        for both in ((trace, SNAPSHOT), (SNAPSHOT, trace)):
            code, _, err = ended(capsys, "diff", *both, "--device", device)
            assert (code, "recorded were: 0" in err) == (2, True)
    assert ended(capsys, "diff", trace, SNAPSHOT, "--device", 0)[0] == 0


@pytest.mark.parametrize("command", [("report",), ("export", "--to", "csv"), ("diff", SNAPSHOT)], ids=" ".join)
def test_a_trace_that_was_cut_off_is_said_to_be_so(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: tuple[str, ...]
) -> None:
    path = tmp_path / "half.npz"
    random_trace(1).save(path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    code, _, err = ended(capsys, *command, path)

    assert (code, "it begins as a trace does (a zip), and its end is missing\n" in err) == (2, True)


def test_an_export_says_where_it_went_and_what_opens_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    random_trace(1, 40).save("job.npz")

    code, out, err = ended(capsys, "export", "job.npz", "--to", "memory_viz")

    assert (code, out, err) == (0, "job.memory-viz.pickle\n", "for pytorch.org/memory_viz\n")
    code, out, err = ended(capsys, "export", "job.npz", "--to", "memory-viz")
    assert (code, out) == (2, "")
    assert "already exists" in err
    code, out, _ = ended(capsys, "report", "job.memory-viz.pickle")
    assert (code, "(predicted, GPU 0)" in out) == (0, True)


@pytest.mark.parametrize("gpu", ["RTX 3060", None])
def test_a_saved_trace_keeps_the_card_of_its_plan(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, gpu: str | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    path, page = tmp_path / "p.npz", tmp_path / "p.html"
    job = ["plan", "forward", "--model", str(tmp_path), "--seq-len", "8", "--save-trace", str(path)]

    assert ended(capsys, *job, *(["--gpu", gpu] if gpu else []))[0] == 0
    code, out, _ = ended(capsys, "report", str(path), "--html", str(page))
    assert (code, f"(predicted, {gpu or 'GPU 0'})" in out) == (0, True)
    _, out, _ = ended(capsys, "report", str(path), "--json")
    assert json.loads(out)["gpu"] == gpu


def test_a_folder_is_reported_like_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    save(training(200, layers=1, depth=2).snapshot(), tmp_path / "run.pickle")

    code, out, _ = ended(capsys, "report", str(tmp_path))

    assert code == 0
    assert "recordings in the folder" in out
