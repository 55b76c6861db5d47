"""Whose failure an exception is: the job's, to be told in one line, or memfit's."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from memfit.analysis.stacks import is_own
from memfit.errors import MemfitError, TraceError

_MEMFIT = Path(__file__).parents[1]
MOST_CAUSES = 20
"""They may go round in a ring."""
_NO_GPU = re.compile(
    r"\bmeta\b|not compiled with CUDA|not linked with support for cuda|compiled without"
    r"|NVIDIA driver|accelerator|data pointer|TensorWrapper"
    r"|incompatible tensor type|swap|CUDA error|ATen_cuda|cuda runtime|_cuda_|torch\.cuda|libcuda",
    re.IGNORECASE,
)
"""Words of torch about a machine without a GPU, or a tensor without memory."""
_NEEDS_PACKAGE = re.compile("pip install|was not found in your environment")
_NO_NETWORK = re.compile(
    r"Name or service not known|Temporary failure in name resolution|NameResolutionError|Max retries exceeded"
    r"|Network is unreachable|No address associated|doesn't exist on the Hugging Face Hub either"
)
_STATIONS = "cuda_names outside memo own_code pretended_card processes stored tracer values"
_IN_BETWEEN = {_MEMFIT / "tracing" / f"{name}.py" for name in _STATIONS.split()}
"""Where the job's calls pass on their way to torch: what torch's own C++ raises seems to come from here."""


@contextmanager
def failures_of_the_job() -> Iterator[None]:
    """What the job's own code raises is the job's failure, said in one line; what memfit raises is memfit's bug."""
    try:
        yield
    except (MemfitError, KeyboardInterrupt):
        raise
    except SystemExit as end:
        place = _nearest_to_the_person(traceback.extract_tb(end.__traceback__))
        raise TraceError(
            f"the job ends itself: sys.exit({_text(end.code, repr)[:300]})",
            hint=f"at {place.filename}:{place.lineno}, in {place.name}",
        ) from end
    except BaseException as raised:
        frames = traceback.extract_tb(raised.__traceback__)
        if _is_memfit_s(raised, frames):
            raise
        error = _first_cause(raised)
        if error is not raised:
            frames.extend(traceback.extract_tb(error.__traceback__))
        raise _in_words(error, frames) from error


def _in_words(error: BaseException, frames: traceback.StackSummary) -> TraceError:
    place = _nearest_to_the_person(frames)
    if isinstance(error, ModuleNotFoundError) and error.name is not None:
        return _missing(error.name, place)
    text = _text(error).partition(", known options are ")[0]  # torch lists hundreds
    lines = [each.strip() for each in text.strip().splitlines()]
    said = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
    what = f"{type(error).__name__}: {said[:300]}" if said else type(error).__name__
    line = f"{place.filename}:{place.lineno}, in {place.name}"
    own = next((f"{each.filename}:{each.lineno}" for each in reversed(frames) if _is_theirs(each.filename)), None)
    if own is not None and not line.startswith(own):
        line = f"{own}; that is {line}"
    if _NO_GPU.search(text):
        return TraceError(
            f"memfit does not cover what the code does at {line}: {what}",
            hint="a GPU may well run it: this comes from the device without memory that memfit runs the code on",
        )
    if isinstance(error, ImportError) and _NEEDS_PACKAGE.search(text):
        return TraceError(
            f"the code needs a package that is not here: {said[:300]}",
            hint=f"asked for at {line}: install it where memfit runs; no GPU is needed for it",
        )
    if _NO_NETWORK.search(text):
        return TraceError(
            f"the code wants something from the network that cannot be reached from here: {said[:300]}",
            hint=f"asked for at {own or line}: put it where the program looks first, or run memfit where it can be"
            " reached; plan script --synthetic-data makes up data sets and tokenizers of the Hub, and encodings of"
            " tiktoken",
        )
    return TraceError(f"the job itself fails: {what}", hint=f"raised at {line}")


def _missing(module: str, place: traceback.FrameSummary) -> TraceError:
    where, package = f"imported at {place.filename}:{place.lineno}", module.partition(".")[0]
    if package != module and find_spec(package) is not None:
        return TraceError(
            f"the code imports {module}, which the installed {package} does not have",
            hint=f"{where}: another version of {package} may have it",
        )
    return TraceError(
        f"the code needs the package {module}, which is not here",
        hint=f"{where}: pip install it where memfit runs, without GPU, or put its folder into PYTHONPATH",
    )


def _is_theirs(file: str) -> bool:
    return is_own(file) and _MEMFIT not in Path(file).parents


def _first_cause(error: BaseException) -> BaseException:
    """Of an import that failed by another one, as in libraries that import late. Where it says what to install, that
    says more."""
    for _ in range(MOST_CAUSES):
        if isinstance(error.__cause__, ImportError) and "pip install" not in _text(error):
            error = error.__cause__
    return error


def _text(said: object, form: Callable[[object], str] = str) -> str:
    try:
        return form(said)
    except BaseException:
        return ""


def _is_memfit_s(error: BaseException, frames: traceback.StackSummary) -> bool:
    files = [Path(frame.filename) for frame in frames]
    while isinstance(error, RuntimeError | IndexError | ValueError | ImportError) and files[-1] in _IN_BETWEEN:
        files.pop()
    return _MEMFIT in files[-1].parents


def _nearest_to_the_person(frames: traceback.StackSummary) -> traceback.FrameSummary:
    """The innermost line outside torch, which raises for others, and outside memfit, which stands in between."""
    import torch

    not_theirs = {_MEMFIT, Path(torch.__file__).parent}
    theirs = [frame for frame in frames if not_theirs.isdisjoint(Path(frame.filename).parents)]
    return (theirs or list(frames))[-1]
