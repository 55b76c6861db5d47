"""Values that the code asks of a tensor, answered by the place that asks.

Code on a GPU may ask a tensor for its value: `if mask.all():`, `loss.item()`. Here there is no value, and what the
code does next depends on it. Each place that is known to ask has its answer below, with what the answer means; at any
other place the trace stops and names file and line. A blanket default would be silently wrong: True stops `generate`
after one token and sends the Trainer into its NaN branch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import FrameType

import torch

from memfit.errors import TraceError

Value = bool | int | float
Answer = Value | Callable[[torch.Tensor], Value]


@dataclass(frozen=True, slots=True)
class Site:
    """A place in somebody's code: the end of its file's path, and the function."""

    file: str
    function: str


_TORCH = os.path.dirname(torch.__file__).replace("\\", "/") + "/"

KNOWN: dict[Site, tuple[Value, str]] = {
    Site("transformers/masking_utils.py", "_ignore_causal_mask_sdpa"): (True, "no padding: the mask is all ones"),
    Site("transformers/masking_utils.py", "_ignore_bidirectional_mask_sdpa"): (
        True,
        "no padding: the mask is all ones",
    ),
    Site("transformers/masking_utils.py", "sdpa_mask"): (True, "no padding: the mask is all ones"),
    Site("transformers/masking_utils.py", "find_packed_sequence_indices"): (True, "one sequence a row, not packed"),
    Site("torch/amp/grad_scaler.py", "_maybe_opt_step"): (0.0, "no gradient overflowed"),
}


class Answers:
    """The table of known places, to which a job may add its own."""

    def __init__(self, more: Mapping[Site, Answer] | None = None) -> None:
        self._more = more or {}
        self.given: dict[str, Value] = {}

    def value(self, tensor: torch.Tensor) -> Value:
        return self._answer(tensor, f"the code asks {_kind(tensor)} for its value")

    def count(self, tensor: torch.Tensor) -> int:
        """How many elements of a mask are true."""
        return int(self._answer(tensor, f"the code selects by {_kind(tensor)}, and how much depends on its values"))

    def refusal(self, tensor: torch.Tensor) -> TraceError:
        """For code that takes all of a tensor to the host, where no single value would be an answer."""
        asker = next((frame for frame in _callers() if not _is_torch(frame)), None)
        return TraceError(
            f"{_at(asker)}the code asks {_kind(tensor)} for all its values",
            hint="without data there are none, and what follows from them cannot be planned: take them outside the"
            " traced code",
        )

    def _answer(self, tensor: torch.Tensor, question: str) -> Value:
        """Asked by the innermost code outside torch, or by torch itself on the way there; nobody further out counts."""
        asker = None
        for frame in _callers():
            asker, site = frame, _site(frame)
            for known, answer in self._more.items():
                if _same(known, site):
                    return self._say(frame, answer(tensor) if callable(answer) else answer)
            for known, (value, _) in KNOWN.items():
                if _same(known, site):
                    return self._say(frame, value)
            if not _is_torch(frame):
                break
        raise TraceError(_at(asker) + question, hint=_HINT)

    def _say(self, frame: FrameType, value: Value) -> Value:
        self.given[_place(frame)] = value
        return value


_HINT = (
    "without data there is no answer, and a guess could be wrong: take the value outside the traced code, "
    "or pass answers={Site(file, function): value}"
)


def _callers() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(3)
    while frame is not None:
        if "/memfit/tracing/" not in _site(frame).file:
            yield frame
        frame = frame.f_back


def _is_torch(frame: FrameType) -> bool:
    return _site(frame).file.startswith(_TORCH)


def _site(frame: FrameType) -> Site:
    return Site(frame.f_code.co_filename.replace("\\", "/"), frame.f_code.co_name)


def _same(known: Site, site: Site) -> bool:
    return known.function == site.function and site.file.endswith(known.file)


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _kind(tensor: torch.Tensor) -> str:
    name = str(tensor.dtype).removeprefix("torch.")
    return f"{'an' if name[0] in 'iu' else 'a'} {name} tensor"


def _at(asker: FrameType | None) -> str:
    return "" if asker is None else f"{_place(asker)}, in {asker.f_code.co_name}: "
