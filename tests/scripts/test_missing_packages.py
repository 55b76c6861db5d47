"""A package that a script asks for and that is not here is named as missing, not the script as broken."""

from __future__ import annotations

from pathlib import Path

import pytest

import memfit
from memfit.errors import TraceError


def test_a_package_that_a_library_asks_for_is_told_as_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said = "Using 4-bit weights requires nobodysbits: `pip install nobodysbits`"
    Path("train.py").write_text(f"raise ImportError({said!r})")
    with pytest.raises(TraceError, match="needs a package that is not here: Using 4-bit weights") as raised:
        memfit.trace_script("train.py")
    assert "no GPU is needed" in str(raised.value.hint)


def test_what_cannot_be_reached_is_told_as_missing_with_the_line_that_wants_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("import urllib.request\nurllib.request.urlopen('http://nobody.invalid/data.txt')\n")
    with pytest.raises(TraceError, match="wants something from the network that cannot be reached from here") as raised:
        memfit.trace_script("train.py")
    assert "train.py:2" in str(raised.value.hint)


def test_the_package_that_is_missing_is_named_where_a_library_raises_another_error_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("library.py").write_text("""
try:
    import nobodys.parts
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("Could not import module 'AutoModel'. Are its requirements defined correctly?") from error
""")
    Path("train.py").write_text(
        "try:\n    import library\nexcept ImportError as e:\n    raise RuntimeError('no') from e"
    )
    with pytest.raises(TraceError, match="needs the package nobodys, which is not here") as raised:
        memfit.trace_script("train.py")
    assert f"imported at {tmp_path}/library.py:3: pip install it" in str(raised.value.hint)


def test_an_error_that_says_what_to_install_is_told_rather_than_its_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = "'nobodys needs: pip install Nobodys-Parts'"
    Path("train.py").write_text(f"try: import nobodys\nexcept ImportError as e: raise ImportError({said}) from e")
    with pytest.raises(TraceError, match=r"needs a package that is not here: .*pip install Nobodys-Parts"):
        memfit.trace_script("train.py")


def test_a_program_that_may_compile_kernels_and_asks_for_none_is_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("""
import torch
from torch.utils.cpp_extension import CUDA_HOME, include_paths, library_paths
assert CUDA_HOME and library_paths("cuda") and include_paths("cuda")
torch.zeros(256, device="cuda")
""")
    assert memfit.trace_script("train.py").peak.allocated_bytes == 1024


def test_kernels_that_a_program_compiles_are_refused_also_where_it_would_do_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("""
import torch
from torch.utils.cpp_extension import load_inline
try:
    load_inline("fused", [""], cuda_sources=["__global__ void fused() {}"], functions=["fused"])
except Exception:
    pass
torch.zeros(256, device="cuda")
""")
    with pytest.raises(TraceError, match=r"train.py:5.*the code compiles CUDA kernels of its own \(fused\)"):
        memfit.trace_script("train.py")
