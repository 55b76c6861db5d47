"""Values that the code asks of a tensor, answered by the place that asks.

Code on a GPU may ask a tensor for its value: `if mask.all():`, `loss.item()`. Here there is no value, and what the
code does next depends on it. Each place that is known to ask has its answer below, with what the answer means; at any
other place the trace stops and names file and line. A blanket default would be silently wrong: True stops `generate`
after one token and sends the Trainer into its NaN branch.
"""

from __future__ import annotations

import linecache
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Literal, NoReturn

import torch
from torch.utils._python_dispatch import _disable_current_modes

from memfit.errors import TraceError
from memfit.tracing.unknown import FINITE_NOTE, UnknownNumber, UnknownWhole, answer_without_error

if TYPE_CHECKING:
    from memfit.tracing.values import Values

Value = bool | int | float
Even = Literal["even"]
EVEN: Even = "even"
"""What is chosen there (topk, argmax), as a router chooses experts, is spread evenly over what there is."""
Answer = Value | Even | Callable[[torch.Tensor], Value]


@dataclass(frozen=True, slots=True)
class Site:
    """A place in somebody's code: the end of its file's path, and the function."""

    file: str
    function: str
    line: str = ""
    """A piece of the line that asks, where the function asks several things."""


_OURS = re.compile("/memfit/(tracing|scripts)/")
GENERATED = "<inductor>"
"""The file of code that torch's compiler has written, which runs in a trace: the code that calls it asks."""
_TORCH = os.path.dirname(torch.__file__).replace("\\", "/") + "/"

VALID = "what distributions and losses check their arguments for, they find"
NO_OUTLIERS = "8-bit products: no activation is beyond the threshold from which its column is multiplied in 16 bits"
DRAWN_ROWS = "new rows of an embedding are drawn around the mean of the old ones, as transformers does where it can"
ABOVE_EPS = "Adafactor: the mean square of every weight is above the least that it divides by"
LBFGS, NOT_DONE = "torch/optim/lbfgs.py", "L-BFGS takes all its iterations, and remembers each direction"
SEARCHES = "each line search of L-BFGS tries two points: one between the first and where it began"
GP, SOLVED = "linear_operator/utils/linear_cg.py", "conjugate gradients of GPyTorch come to an end as soon as they may"
OF_TORCHMETRICS = ("stat_scores", "confusion_matrix", "precision_recall_curve")
BOTH_KINDS = "curves of torchmetrics (ROC) see answers of both kinds, and rise"
NO_OVERFLOW: dict[Site, tuple[Value | Callable[[torch.Tensor], Value], str]] = {
    Site("torch/amp/grad_scaler.py", "_maybe_opt_step"): (0.0, "no gradient overflowed"),
    Site("torch/distributions/distribution.py", "__init__"): (True, VALID),
    Site("torch/distributions/distribution.py", "_validate_sample"): (True, VALID),
    Site("torch/nn/functional.py", "gaussian_nll_loss"): (False, VALID),
    Site(LBFGS, "step", "float("): (math.nan, NOT_DONE),
    Site(LBFGS, "step", "alpha="): (math.nan, NOT_DONE),
    Site(LBFGS, "_add_grad"): (math.nan, NOT_DONE),
    Site(LBFGS, "step", "ys > 1e-10"): (True, NOT_DONE),
    Site(LBFGS, "step", "min(1.0"): (True, NOT_DONE),
    Site(LBFGS, "step", "if "): (False, NOT_DONE),
    Site(LBFGS, "_directional_evaluate", "float("): (math.nan, SEARCHES),
    Site(LBFGS, "_strong_wolfe", "(ls_iter > 1"): (True, SEARCHES),
    Site(LBFGS, "_strong_wolfe", "bracket_f[low_pos]"): (False, SEARCHES),
    Site(LBFGS, "_strong_wolfe", "<= -c2 * gtd"): (True, SEARCHES),
    Site(LBFGS, "_strong_wolfe", "d_norm <"): (False, SEARCHES),
    Site(LBFGS, "_strong_wolfe", "max(bracket)"): (False, SEARCHES),
    Site(LBFGS, "_cubic_interpolate", "x1 <= x2"): (True, SEARCHES),
    Site(LBFGS, "_cubic_interpolate", "d2_square"): (False, SEARCHES),
    Site(GP, "linear_cg", "has_converged.all()"): (False, SOLVED),
    Site(GP, "linear_cg", "residual_norm.mean()"): (True, SOLVED),
    Site(GP, "linear_cg", "t_mat["): (False, SOLVED),
    **{
        Site(f"torchmetrics/functional/classification/{file}.py", f"_{kind}_{file}_tensor_validation", "unique("): (
            1,
            VALID,
        )
        for file in OF_TORCHMETRICS
        for kind in ("binary", "multiclass", "multilabel")
    },
    Site("torchmetrics/functional/classification/roc.py", "_binary_roc_compute", "<= 0"): (False, BOTH_KINDS),
    Site("torchmetrics/utilities/compute.py", "_auc_compute", "dx <"): (False, BOTH_KINDS),
    Site("torchmetrics/functional/classification/precision_recall_curve.py", "_binary_clf_curve", "preds[1:]"): (
        torch.Tensor.numel,
        "no two scores of a curve (ROC, precision and recall) are equal, which takes most",
    ),
    Site("bitsandbytes/backends/cuda/ops.py", "_"): (False, NO_OUTLIERS),
    Site("transformers/optimization.py", "_get_lr"): (True, ABOVE_EPS),
    Site("transformers/modeling_utils.py", "_init_added_embeddings_weights_with_mean"): (True, DRAWN_ROWS),
}
KNOWN: dict[Site, tuple[Value | Callable[[torch.Tensor], Value], str]] = {
    Site("transformers/masking_utils.py", "_ignore_causal_mask_sdpa"): (True, "no padding: the mask is all ones"),
    Site("transformers/masking_utils.py", "_ignore_bidirectional_mask_sdpa"): (
        True,
        "no padding: the mask is all ones",
    ),
    Site("transformers/masking_utils.py", "sdpa_mask"): (True, "no padding: the mask is all ones"),
    Site("transformers/masking_utils.py", "find_packed_sequence_indices"): (True, "one sequence a row, not packed"),
    **NO_OVERFLOW,
}

ALL_HAVE_ROWS: dict[Site, Answer] = {
    Site("torch/nn/modules/_functions.py", "forward", "[mask]"): lambda mask: mask.numel()
}
"""SyncBatchNorm leaves out processes whose batch is empty: none is."""

RIGHT = "answers whose right ones are counted are right"
HARMLESS: tuple[tuple[re.Pattern[str], bool, str], ...] = (
    (re.compile(r"isfinite"), True, FINITE_NOTE),
    (re.compile(r"isnan|isinf|\bnans?(?![a-z])|\binf\b"), False, FINITE_NOTE),
    (re.compile(r"best|lowest|highest"), True, "each result that is compared with the best so far is a new best"),
    (re.compile(r"(correct|right|hits?)\w*\s*\+=|\bint\(\w*correct|acc(s|uracy|uracies)?\b.*\bint\("), True, RIGHT),
    (re.compile(r"\bchr\("), False, "characters of numbers that nobody knows are the first that the line can make"),
)
"""By what stands in the line that asks: decisions that change what is logged or kept, answered as most runs do, and
where memory may depend on it, by the larger answer."""
PASSED = "what the program only checks (`assert`, an `if` that raises an error) is as it should be"
MOST_LINES = 4
_SAME_MASK = re.compile(r"\s*[\w.]+\[([\w.~ ]+)\]\s*[-+*/]?=[^=].*\[\1\]")
"""`x[mask] = y[mask]`: what is selected is as much as what is written, and the code goes on alike."""
_DECIDES = re.compile(r"\b(if|while|assert|and|or|not|min|max)\b|[<>]|[=!]=")
_COMPARES = re.compile(r"item\(\)\)*\s*([<>]|[=!]=)|([<>]=?|[=!]=)\s*[\w.\[\]]*\.item\(\)")
UNKNOWN = "numbers that nobody knows, such as a loss, show as ?; numpy takes them for NaN, also where it compares"
IN_ARRAYS = (
    "not modelled: what the program decides by numbers of the GPU that numpy is given, such as predictions: they are"
    " NaN there, also where it compares them"
)
"""It stands beside the verdict: how much a program keeps may follow from them, and no line can be asked."""
FIRST_CHOSEN = (
    "not modelled: what the program decides by classes or actions that the GPU chooses (`argmax`): each of them is"
    " the first, 0, where arrays, lists or an environment are given it"
)
"""Beside the verdict too. Any will do for an environment; how long a text or an episode is may follow from it."""
IN_BINS = "values that `bincount` counts are less than its `minlength`"
BLACK = (
    "not modelled: what the program decides by pictures (bytes) of the GPU that numpy is given: they are black there"
)
MOST_FILLED = 1 << 24
AS_FLOAT = "float() of a number that nobody knows, such as a loss, is NaN"
ALL_TRUE = "masks that say where numbers are written are true everywhere, which takes most"
DRAWN = "whole numbers drawn at random on the GPU were drawn on the host: sizes that follow from them may differ"


class Answers:
    """The table of known places, to which a job may add its own."""

    def __init__(
        self,
        more: Mapping[Site, Answer] | None = None,
        known: Mapping[Site, tuple[Value | Callable[[torch.Tensor], Value], str]] = KNOWN,
    ) -> None:
        self._more = more or {}
        self._known = known
        self._lines: dict[tuple[str, int], Value | Even] = {}
        self._lines_asked: set[tuple[str, int]] = set()
        self.values: Values | None = None
        self.questions = 0
        """How often the code has asked for values, known or not."""
        self.unexplained = 0
        """How often for such as do not follow from tensors whose origin is noted."""
        self.asked_about: dict[int, bool] = {}
        """The origins of the others, and whether more was asked than yes or no."""
        self.refused: TraceError | None = None
        """The first that memfit refused, whether or not the code lets it pass: a GPU would not have stopped there."""
        self._chosen_in: str | None = None
        """The line that last chose by values that nobody knows."""
        self.given: dict[str, Value | Even] = {}
        self.meanings: dict[str, None] = {}
        """What the answers given from the table mean."""
        self.checked: dict[str, None] = {}
        """Lines that only check."""

    @property
    def told(self) -> dict[str, None]:
        if not self.checked:
            return self.meanings
        lines = [
            f"{os.path.basename(file)}:{line}" for file, _, line in (each.rpartition(":") for each in self.checked)
        ]
        more = f" and {len(lines) - MOST_LINES} more" if len(lines) > MOST_LINES else ""
        return self.meanings | {f"{PASSED}: {', '.join(lines[:MOST_LINES])}{more}": None}

    def value(self, tensor: torch.Tensor) -> Value:
        if (known := self._read(tensor)) is not None:
            value: Value = known.item()
            return value
        return self._answer(tensor, f"the code asks {_kind(tensor)} for its value")

    def count(self, tensor: torch.Tensor) -> int:
        """How many elements of a mask are true."""
        if (known := self._read(tensor)) is not None:
            return int(known.count_nonzero())
        if _writes_where_it_reads(next(_callers(), None)) and self._known_answer(tensor)[1] is None:
            self.meanings[ALL_TRUE] = None
            return tensor.numel()
        return int(self._answer(tensor, f"the code selects by {_kind(tensor)}, and how much depends on its values"))

    def kinds(self, tensor: torch.Tensor) -> int:
        """How many different values there are."""
        if (known := self._read(tensor)) is not None:
            with torch._C.DisableTorchFunction(), _disable_current_modes():
                return int(torch.unique(known).numel())
        return int(self._answer(tensor, f"the code asks which values {_kind(tensor)} has"))

    def bins(self, tensor: torch.Tensor, at_least: int) -> int:
        """How many counts there are, from 0 to the largest value."""
        if (known := self._read(tensor)) is not None and known.numel():
            with torch._C.DisableTorchFunction(), _disable_current_modes():
                return max(int(known.max()) + 1, at_least)
        if at_least:
            self.meanings[IN_BINS] = None
            return at_least
        return int(self._answer(tensor, f"the code counts the values of {_kind(tensor)}, as many as the largest"))

    def most(self, mask: torch.Tensor) -> int:
        """How many elements of a mask are true at the most, for code that goes on alike however many they are."""
        if self.values is None or self._read(mask) is not None or self._known_answer(mask)[1] is not None:
            return self.count(mask)
        self.meanings[ALL_TRUE] = None
        return mask.numel()

    def _read(self, tensor: torch.Tensor) -> torch.Tensor | None:
        self.questions += 1
        if self.values is None:
            return None
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            found = self.values.read(tensor)
        if found is not None:
            self.note_draws([tensor])
        return found

    def note_draws(self, tensors: Sequence[torch.Tensor]) -> None:
        """Values of these tensors, which are known, are given to the code."""
        self.questions += 1
        if self.values is None:
            return
        for tensor in tensors:
            origins, is_more = self.values.origins(tensor), tensor.dtype != torch.bool or tensor.numel() > 1
            self.unexplained += origins is None
            self.asked_about |= {each: is_more or self.asked_about.get(each, False) for each in origins or ()}
        if self.values.drawn:
            self.meanings[DRAWN] = None

    def unknown(self, tensor: torch.Tensor) -> Value:
        """For a value that is told to people, such as a loss or a count of right answers."""
        asked = f"the code asks {_kind(tensor)} for its value"
        if tensor.dtype == torch.bool:
            return self._answer(tensor, asked)
        asker, said = self._known_answer(tensor)
        if said is not None and type(said) is not bool:  # yes and no answer what the code makes of it
            return said
        if asker is not None and not _COMPARES.search(_line(asker)) and self._is_choice(tensor):
            return 0
        self.meanings[UNKNOWN] = None
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            like = torch.zeros((), dtype=tensor.dtype)  # a number that is kept must not keep memory of the GPU
        kind = UnknownNumber if tensor.is_floating_point() else UnknownWhole
        return kind(lambda: bool(self._answer(like, "the code decides by a number that is not known")))

    def plain_float(self, tensor: torch.Tensor) -> float:
        """`float(loss)` is Python's own float and no longer known as unknown: a line that decides by it asks here."""
        asker, said = self._known_answer(tensor)
        if said is not None:
            return float(said)
        if asker is not None and _DECIDES.search(_line(asker)):
            return float(self._answer(tensor, "the code decides by a number that is not known"))
        self.meanings[AS_FLOAT] = None
        return math.nan

    def fill(self, tensor: torch.Tensor) -> Value:
        """What stands in an array or a list for each value of a tensor that nobody knows: what a person says in that
        line, or NaN. There is none among whole numbers, and other ones could be taken for sizes; but bytes in rows and
        columns are pictures."""
        said = self._known_answer(tensor)[1]
        if said is not None:
            return said
        if tensor.numel() <= MOST_FILLED and self._is_choice(tensor):
            return 0
        if tensor.dtype == torch.uint8 and tensor.dim() > 1 and tensor.numel() <= MOST_FILLED:
            self.meanings[BLACK] = None
            return 0
        if not tensor.is_floating_point() or tensor.numel() > MOST_FILLED:
            raise self.refusal(tensor)
        self.meanings[IN_ARRAYS] = None
        return math.nan

    def _is_choice(self, tensor: torch.Tensor) -> bool:
        if self.values is None or not self.values.is_choice(tensor):
            return False
        self.meanings[FIRST_CHOSEN] = None
        return True

    def refusal(self, tensor: torch.Tensor) -> TraceError:
        """For code that takes all of a tensor to the host, where no single value would be an answer."""
        asker = next((frame for frame in _callers() if not _is_torch(frame)), None)
        where = "train.py:123" if asker is None else _short_place(asker)
        return TraceError(
            f"{_at(asker)}the code asks {_kind(tensor)} for all its values",
            hint="memfit runs the code without data, so there are none: leave the line out of the traced code, or,"
            f" where they are only logged or counted, --answer {where}=0 of plan script takes each of them for 0",
        )

    def chooses_evenly(self) -> bool:
        """Whether a person says so of the line that chooses now, by values that nobody knows."""
        for frame in _callers():
            if _is_torch(frame):
                continue
            self._chosen_in = _short_place(frame)
            if self._even_place(frame):
                self.given[_place(frame)] = EVEN
                self.meanings[f"what {self._chosen_in} chooses is spread evenly, as answered: a real choice is not"] = (
                    None
                )
                return True
            break
        return False

    def _even_place(self, frame: FrameType) -> bool:
        site = _site(frame)
        for (file, number), said in self._lines.items():
            if said == EVEN and _is_line(frame, file, number):
                self._lines_asked.add((file, number))
                return True
        return any(said == EVEN and _same(known, site) for known, said in self._more.items())

    def refuse(self, error: TraceError) -> NoReturn:
        self.refused = self.refused or error
        raise error

    def answer_line(self, file: str, line: int, value: Value | Even) -> None:
        """What a person says is so in one line of their code."""
        self._lines[file, line] = value

    def lines_not_asked(self) -> list[str]:
        """Answers of a person that no line has asked for."""
        return [f"{file}:{line}" for file, line in self._lines if (file, line) not in self._lines_asked]

    def _answer(self, tensor: torch.Tensor, question: str) -> Value:
        asker, said = self._known_answer(tensor)
        if said is not None:
            return said
        if asker is None or self.values is None:
            self.refuse(TraceError(_at(asker) + question, hint=_hint(asker, self._chosen_in)))
        for words, value, meaning in HARMLESS:
            if words.search(_line(asker)):
                self.meanings[meaning] = None
                return self._say(asker, value)
        if (passing := answer_without_error(asker)) is not None:
            self.checked[_place(asker)] = None
            return self._say(asker, passing)
        return self.refuse(TraceError(_at(asker) + question, hint=_hint(asker, self._chosen_in)))

    def _known_answer(self, tensor: torch.Tensor) -> tuple[FrameType | None, Value | None]:
        """Asked by the innermost code outside torch, or by torch itself on the way there; nobody further out counts."""
        self.questions += 1
        self.unexplained += 1
        asker = None
        for frame in _callers():
            asker, site = frame, _site(frame)
            for (file, number), said in self._lines.items():
                if said != EVEN and _is_line(frame, file, number):
                    self._lines_asked.add((file, number))
                    self.meanings[f"{file}:{number} was answered with {str(said).lower()}"] = None
                    return asker, self._say(frame, said)
            for known, answer in self._more.items():
                if answer != EVEN and _same(known, site) and known.line in _line(frame):
                    return asker, self._say(frame, answer(tensor) if callable(answer) else answer)
            for known, (value, meaning) in self._known.items():
                if _same(known, site) and known.line in _line(frame):
                    self.meanings[meaning] = None
                    return asker, self._say(frame, value(tensor) if callable(value) else value)
            if not _is_torch(frame):
                break
        return asker, None

    def _say(self, frame: FrameType, value: Value) -> Value:
        self.given[_place(frame)] = value
        return value


def _writes_where_it_reads(frame: FrameType | None) -> bool:
    return frame is not None and _SAME_MASK.match(_line(frame)) is not None


def _short_place(frame: FrameType) -> str:
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def _hint(asker: FrameType | None, chosen_in: str | None = None) -> str:
    file, line, function = "train.py", 123, "the_function_that_asks"
    if asker is not None:
        file, line, function = os.path.basename(asker.f_code.co_filename), asker.f_lineno, asker.f_code.co_name
    said = (
        "memfit runs the code without data, so there is no value, and a guess could be wrong: leave the line out of the"
        f' traced code, or give the value: --answer {file}:{line}=true of plan script, answers={{("{file}",'
        f' "{function}"): True}} of memfit.trace'
    )
    if chosen_in is None:
        return said
    return f"{said}; if it follows from what {chosen_in} chooses, such as experts: --answer {chosen_in}=even"


def asking_line() -> str:
    """The person's line, to begin a sentence with."""
    return _at(next((frame for frame in _callers() if not _is_torch(frame)), None))


def asked_by(file: str) -> bool:
    """Whether the code that asks stands in that file."""
    return _site(next(_callers())).file.endswith(f"/{file}")


def _callers() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not _OURS.search(_site(frame).file):
            yield frame
        frame = frame.f_back


def _is_line(frame: FrameType, file: str, number: int) -> bool:
    return frame.f_lineno == number and f"/{_site(frame).file}".endswith(f"/{file}")


def _is_torch(frame: FrameType) -> bool:
    return _site(frame).file.startswith((_TORCH, GENERATED))


def _site(frame: FrameType) -> Site:
    return Site(frame.f_code.co_filename.replace("\\", "/"), frame.f_code.co_name)


def _same(known: Site, site: Site) -> bool:
    return known.function == site.function and site.file.endswith(known.file)


def _line(frame: FrameType) -> str:
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno)


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _kind(tensor: torch.Tensor) -> str:
    name = str(tensor.dtype).removeprefix("torch.")
    return f"{'an' if name[0] in 'iu' else 'a'} {name} tensor"


def _at(asker: FrameType | None) -> str:
    return "" if asker is None else f"{_place(asker)}, in {asker.f_code.co_name}: "
