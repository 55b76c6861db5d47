"""Where in the program memory ran out: the traceback's frames, the phase of the job, what the lines work on.

Frames tell what was going on by their files, their functions and the words of their code.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from memfit.analysis.stacks import short_path
from memfit.explaining.message import LocatedOom

_PACKAGES = re.compile(r"(?:site|dist)-packages/")


@dataclass(frozen=True, slots=True)
class CodeFrame:
    path: str
    line: int
    function: str
    code: str = ""

    @property
    def inside(self) -> str:
        """The path without where packages lie: an environment in /opt/torch does not make all of them torch."""
        return "/" + _PACKAGES.split(self.path.replace("\\", "/"))[-1]


@dataclass(frozen=True, slots=True)
class Sign:
    """Any of its words makes a frame one: a part of its path, the whole name of its function (`*` stands for anything),
    or a part of its code."""

    meaning: str
    paths: tuple[str, ...]
    functions: tuple[str, ...]
    code: tuple[str, ...]

    def at(self, frame: CodeFrame) -> bool:
        return self.within(frame) or any(part in frame.code for part in self.code)

    def within(self, frame: CodeFrame) -> bool:
        """Whether the frame itself is one, and not only a line that calls one."""
        named = any(fnmatchcase(frame.function, name) for name in self.functions)
        return named or any(part in frame.inside for part in self.paths)


def _sign(meaning: str, *, paths: str = "", functions: str = "", code: str = "") -> Sign:
    return Sign(meaning, tuple(paths.split()), tuple(functions.split()), tuple(code.split(" | ")) if code else ())


PHASES = (
    _sign("saving",
          functions="save_pretrained save_checkpoint _save_checkpoint _save save_model save_state _save_optimizer*",
          code="torch.save( | .save_pretrained("),
    _sign("loading", paths="/core_model_loading.py /model_loader/ /safetensors/torch.py",
          functions="from_pretrained _load_pretrained_model _load_state_dict_into* load_state_dict load_checkpoint* "
          "dispatch_model set_module_tensor_to_device caching_allocator_warmup load_model get_llm flatten_tensors "
          "_load_optimizer*", code="from_pretrained( | torch.load( | model.to( | model.cuda("),
    _sign("evaluation", paths="/lm_eval/",
          functions="evaluate evaluation_loop prediction_step predict eval_ppl* perplexity validation_step",
          code=".evaluate("),
    _sign("generation", paths="/generation/utils.py /vllm/ /sglang/ /comfy/ /diffusers/pipelines/",
          functions="generate _sample _beam_search _greedy_search _prefill", code=".generate("),
    _sign("calibration", paths="/lib/prune.py /gptq /sparsegpt /jobs/pruning/",
          functions="prepare_calibration_input prune_* fasterprune add_batch calibrate*"),
    _sign("optimizer step",
          paths="/torch/optim/ /bitsandbytes/optim/ /apex/optimizers/ /deepspeed/runtime/zero/stage "
          "/utils/clip_grad.py", functions="_init_group _multi_tensor_adam* _fused_adam* _single_tensor_adam*",
          code="optimizer.step( | optim.step("),
    _sign("backward", paths="/torch/autograd/__init__.py /torch/autograd/graph.py /torch/autograd/function.py",
          functions="_engine_run_backward backward unpack_hook recompute_fn", code=".backward("),
    _sign("loss", paths="/loss_utils.py /torch/nn/modules/loss.py /transformers/loss/ cross_entropy",
          functions="cross_entropy nll_loss ForCausalLMLoss fixed_cross_entropy compute_logits log_softmax kl_div",
          code="cross_entropy( | loss_function( | lm_head( | logits.float() | loss_fct( | log_softmax("),
    _sign("data", paths="/torch/utils/data/ /datasets/", functions="pin_memory collate* default_collate"),
    _sign("forward", paths="/transformers/models/",
          functions="forward _call_impl _wrapped_call_impl training_step compute_loss *attention_forward "
          "_conv_forward dequantize_4bit"),
)  # fmt: skip
"""In this order: what a stack has anywhere of the first ones decides, for a forward pass is in all of them."""

HINTS = (
    _sign("logits", paths="/loss_utils.py /nn/modules/loss.py /transformers/loss/ cross_entropy",
          functions="*cross_entropy ForCausalLMLoss nll_loss log_softmax compute_logits convert_to_fp32",
          code="lm_head( | logits | cross_entropy | log_softmax"),
    _sign("attention", functions="eager_attention_forward _attn attention_forward",
          code="attn_weights | attention_scores | softmax(attn | matmul(quer | q @ k | scaled_dot_product_attention("),
    _sign("attention-output", paths="/sdpa_attention.py /flash_attention /flash_attn",
          functions="sdpa_attention_forward scaled_dot_product_attention repeat_kv apply_rotary_pos_emb rotate_half",
          code="scaled_dot_product_attention | apply_rotary | rotate_half"),
    _sign("convolution", paths="/nn/modules/conv.py", code="conv1d( | conv2d( | conv3d("),
    _sign("attention-mask", paths="/masking_utils.py /modeling_attn_mask_utils.py", code="causal_mask"),
    _sign("mlp", paths="/activations.py",
          code="gate_proj( | up_proj( | down_proj( | self.act_fn | self.c_fc | mlp( | gelu( | silu("),
    _sign("calibration", functions="prepare_calibration_input", code="inps = torch.zeros | zeros_like(inps"),
    _sign("hessian", functions="fasterprune add_batch", code="hessian | cholesky | self.H "),
    _sign("sort", code="torch.sort( | .sort( | topk("),
    _sign("kv-cache", paths="/cache_utils.py",
          functions="_update_cache early_initialization lazy_initialization *kv_cache*",
          code="kv_cache | past_key_values.update | past_key_value.update | key_cache | StaticCache"),
    _sign("weights",
          paths="/torch/optim/ /core_model_loading.py /bitsandbytes/optim/ /distributed/fsdp/ /nn/utils/prune.py",
          functions="from_pretrained _init_group convert load_state_dict __deepcopy__ get_delta_weight",
          code="zeros_like(p | exp_avg"),
    _sign("packed weights", paths="/bitsandbytes/autograd/ /bitsandbytes/backends/cuda/",
          functions="dequantize_4bit _dequant_linear_fallback gemm_4bit matmul_4bit",
          code="dequantize_4bit( | gemm_4bit("),
)  # fmt: skip
"""What the failing line works on."""

ENGINES = _sign("engines", paths="/vllm/ /sglang/ /comfy/ /diffusers/")
"""Programs that arrange memory their own way: what memfit predicts is not what they do."""
COLLECTING = _sign("collecting", paths="/trainer_pt_utils.py", functions="nested_concat")
"""Logits of several batches, joined for the metrics."""
COMPILED = _sign("compiled", paths="/torchinductor_ /_inductor/ /_functorch/_aot_autograd/")
TIMING = _sign("timing", paths="/_inductor/runtime/benchmarking.py /_inductor/runtime/triton_heuristics.py")
"""Copies and a buffer as large as the L2 cache, beside what the step holds: once for each kernel."""
RECOMPUTING = _sign("recomputing", paths="/torch/utils/checkpoint.py gradient_checkpointing")
LIBRARIES = _sign(
    "libraries", paths="/torch/ /accelerate/ /lightning/ /pytorch_lightning/ /deepspeed/ /peft/tuners/ /torch_xla/"
)
INNERMOST = 6
"""Frames in which a line that works on something is looked for: further out everything is a model's forward."""


def phase_of(inner: Sequence[CodeFrame]) -> tuple[str | None, CodeFrame | None]:
    """Of frames innermost first: the phase, and the frame that tells it."""
    for sign in PHASES:
        found = next((frame for frame in inner if sign.at(frame)), None)
        if found is None:
            continue
        if sign.meaning == "loss" and not any(sign.at(frame) for frame in inner[:INNERMOST]):
            continue  # compute_loss of a Trainer is not the loss itself
        if sign.meaning == "optimizer step" and _has_a_pass(inner[: inner.index(found)]):
            continue  # Lightning runs the whole step as the optimizer's closure
        if sign.meaning in CALLED and not any(map(sign.within, inner)) and _has_a_pass(inner[: inner.index(found)]):
            continue  # model(x).loss.backward() has a forward pass on the same line
        return sign.meaning, found
    return None, None


CALLED = ("evaluation", "generation", "optimizer step", "backward")
"""Phases that have frames of their own where they are under way."""


def _has_a_pass(within: Iterable[CodeFrame]) -> bool:
    passes = [sign for sign in PHASES if sign.meaning in ("backward", "loss", "forward")]
    return any(sign.at(frame) for frame in within for sign in passes)


def pass_within(inner: Sequence[CodeFrame]) -> str | None:
    """Of an evaluation or the like: which pass of the model."""
    near = inner[:INNERMOST]
    passes = (sign for sign in PHASES if sign.meaning in ("loss", "forward"))
    return next((sign.meaning for sign in passes if any(sign.at(frame) for frame in near)), None)


def hints_of(inner: Sequence[CodeFrame], phase: str | None) -> frozenset[str]:
    """Of the innermost frame that says anything: an lm_head further out does not make a rotary embedding logits."""
    for frame in inner[:INNERMOST]:
        found = {sign.meaning for sign in HINTS if sign.at(frame)}
        if found:
            return frozenset(found)
    return frozenset({"weights"}) if phase in ("optimizer step", "loading") else frozenset()


MAX_LINES_BACK = 3000
MAX_FRAMES = 400
MAX_CODE, MAX_AROUND = 160, 2000

_TRACEBACK = "Traceback (most recent call last)"
_FRAME = re.compile(
    r'File "([^"]{1,400})", line (\d{1,7}), in (<?[\w.]{1,120}>?)'  # CPython
    r"|File \[?([^\s:\"\[\]]{1,400}\.py):(\d{1,7})(?:\]\(\S{1,400}\))?, in ([\w.<>]{1,120})"  # IPython
    r"|(?<![~/\w.-])([~/\w.-]{1,400}\.py):(\d{1,7}) in (<?[\w.]{1,120}>?)"  # rich
    r"|(?<![~/\w.-])([~/\w.-]{1,400}\.py|<ipython-input-[\w-]{1,60}>)() in (<?[\w.: ]{1,120}>?)\("  # notebooks
)
_ARROW = re.compile(r"(?:-+>|❱) ?(\d{1,7})\b[ │]*(.*)")
"""The failing line among its neighbours, each with its number."""
_BUFFER = re.compile(r"empty_strided_\w{2,8}\(\((\d{1,12}(?:, \d{1,12}){0,7}),?\), \([\d, ]{0,80}\), torch\.(\w{3,16})")
"""Of compiled code."""
ITEMSIZES = {
    "float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
_MARKS = re.compile(r"[~^]{2,}|\.\.\.<\d+ lines>\.\.\.")
_ERROR = re.compile(r"\b[\w.]{1,80}(?:Error|Exception)\b(?::|$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class FailurePlace:
    """`frames` is outermost first; phase None where nothing tells it."""

    frames: tuple[CodeFrame, ...] = ()
    phase: str | None = None
    because: CodeFrame | None = None
    """The frame that the phase was read from."""
    detail: str = ""
    shown: CodeFrame | None = None
    """Where a person would look: the innermost line outside torch."""
    hints: frozenset[str] = frozenset()
    written: tuple[tuple[int, ...], int] | None = None
    """The shape that the failing line asks for and the bytes of an element, where it spells them out."""

    def at(self, sign: Sign) -> bool:
        return any(map(sign.at, self.frames))

    def within(self, sign: Sign) -> bool:
        return any(map(sign.within, self.frames))


def frame_text(frame: CodeFrame) -> str:
    return f"{short_path(frame.path)}:{frame.line} {frame.function}".strip()


def frames_before(located: LocatedOom) -> tuple[CodeFrame, ...]:
    """The frames of the traceback that ends in this message. Lines of other ranks do not count."""
    passage = located.passage
    at = passage.index_at(located.offset)
    rank, first = passage.ranks[at], max(at - MAX_LINES_BACK, 0)
    kept: list[str] = []
    for number in range(at, first - 1, -1):
        if passage.ranks[number] != rank:
            continue
        kept.append(passage.lines[number])
        if _TRACEBACK in passage.lines[number]:
            break
    text = ("" if passage.breaks_words else " ").join(reversed(kept))
    if passage.breaks_words:
        text = passage.flat[passage.offset_of(max(at - len(kept) + 1, 0)) : located.offset]
    return tuple(_frames(text[: _end_of_frames(text, located)]))


def _end_of_frames(text: str, located: LocatedOom) -> int:
    found = text.rfind(located.oom.message[:24]) if located.oom.message else -1
    return found if found >= 0 else len(text)


def _frames(text: str) -> Iterator[CodeFrame]:
    found = list(_FRAME.finditer(text))[-MAX_FRAMES:]
    for each, following in zip(found, [*found[1:], None], strict=False):
        path, line, function = next(each.groups()[i : i + 3] for i in (0, 3, 6, 9) if each.group(i + 1))
        code = text[each.end() : following.start() if following else len(text)][:MAX_AROUND]
        arrow = _ARROW.search(code)
        if arrow:
            line, code = arrow[1], arrow[2].partition(f" {int(arrow[1]) + 1} ")[0]
        yield CodeFrame(path, int(line or 0), function, _code(code))


def _code(text: str) -> str:
    text = " ".join(_MARKS.sub(" ", text).split())
    error = _ERROR.search(text)
    return (text[: error.start()] if error else text)[:MAX_CODE].strip(" │")


def frames_of_stack(lines: Sequence[str]) -> tuple[CodeFrame, ...]:
    """From a snapshot's report: `path.py:12 name`, innermost first."""
    made = []
    for line in lines:
        found = re.match(r"(.{1,400}?):(\d{1,7}) (.{0,120})$", line)
        if found and found[1].endswith((".py", ".pyx", ".pyi", ">")):
            made.append(CodeFrame(found[1], int(found[2]), found[3]))
    return tuple(reversed(made))


# -- what was going on -----------------------------------------------------------------------------------------------

_AROUND = ("evaluation", "generation", "calibration")


def place_from(frames: Sequence[CodeFrame]) -> FailurePlace:
    """Frames are outermost first, as Python prints them."""
    if not frames:
        return FailurePlace()
    inner = list(reversed(frames))
    phase, because = phase_of(inner)
    return FailurePlace(
        frames=tuple(frames),
        phase=phase,
        because=because,
        detail=_detail(inner, phase),
        shown=next((frame for frame in inner if not LIBRARIES.at(frame)), inner[0]),
        hints=hints_of(inner, phase),
        written=_written(inner[0].code),
    )


def _written(code: str) -> tuple[tuple[int, ...], int] | None:
    found = _BUFFER.search(code)
    if found is None or found[2] not in ITEMSIZES:
        return None
    return tuple(int(side) for side in found[1].split(",")), ITEMSIZES[found[2]]


def _detail(inner: Sequence[CodeFrame], phase: str | None) -> str:
    if phase in ("backward", "forward") and any(map(RECOMPUTING.at, inner)):
        return "computing a checkpointed block again" if phase == "backward" else "in a checkpointed block"
    if any(map(COMPILED.within, inner)):
        timing = any(map(TIMING.within, inner))
        return "timing a generated kernel, at its first launch" if timing else "in code that torch.compile generated"
    if phase == "loss" and any("lm_head(" in frame.code for frame in inner[:INNERMOST]):
        return "making the logits"
    if phase in _AROUND:
        return {"loss": "in its loss", "forward": "in its forward pass"}.get(pass_within(inner) or "", "")
    return ""
