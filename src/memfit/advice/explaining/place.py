"""Where in the program memory ran out: the traceback's frames, the phase of the job, and what the lines work on."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from memfit.advice.oom_message import Located
from memfit.core.stack_reading import short_path

MAX_LINES_BACK = 3000
MAX_FRAMES = 400
MAX_CODE = 160

_TRACEBACK = "Traceback (most recent call last)"
_FRAME = re.compile(
    r'File "([^"]{1,400})", line (\d{1,7}), in (<?[\w.]{1,120}>?)'  # CPython
    r"|File ([^\s:\"]{1,400}\.py):(\d{1,7}), in ([\w.<>]{1,120})"  # IPython
    r"|([~/\w.-]{1,400}\.py):(\d{1,7}) in (<?[\w.]{1,120}>?)"  # rich
)
_MARKS = re.compile(r"[~^]{2,}|\.\.\.<\d+ lines>\.\.\.")
_ERROR = re.compile(r"\b[\w.]{1,80}(?:Error|Exception)\b(?:: |$)")


@dataclass(frozen=True, slots=True)
class CodeFrame:
    path: str
    line: int
    function: str
    code: str = ""

    @property
    def said(self) -> str:
        return f"{short_path(self.path)}:{self.line} {self.function}".strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """`frames` is outermost first; phase None where nothing tells it."""

    frames: tuple[CodeFrame, ...] = ()
    phase: str | None = None
    because: CodeFrame | None = None
    """The frame that the phase was read from."""
    detail: str = ""
    shown: CodeFrame | None = None
    """Where a person would look: the innermost line outside torch."""
    hints: frozenset[str] = frozenset()


def place_of(located: Located) -> Place:
    return place_from(frames_before(located))


def frames_before(located: Located) -> tuple[CodeFrame, ...]:
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


def _end_of_frames(text: str, located: Located) -> int:
    found = text.rfind(located.oom.message[:24]) if located.oom.message else -1
    return found if found >= 0 else len(text)


def _frames(text: str) -> Iterator[CodeFrame]:
    found = list(_FRAME.finditer(text))[-MAX_FRAMES:]
    for each, following in zip(found, [*found[1:], None], strict=True):
        path, line, function = next(each.groups()[i : i + 3] for i in (0, 3, 6) if each.group(i + 1))
        code = text[each.end() : following.start() if following else each.end() + 2 * MAX_CODE]
        yield CodeFrame(path, int(line), function, _code(code))


def _code(text: str) -> str:
    text = " ".join(_MARKS.sub(" ", text).split())
    error = _ERROR.search(text)
    return (text[: error.start()] if error else text)[:MAX_CODE].strip()


def frames_of_stack(lines: Sequence[str]) -> tuple[CodeFrame, ...]:
    """From a snapshot's report: `path.py:12 name`, innermost first."""
    made = []
    for line in lines:
        found = re.match(r"(.{1,400}?):(\d{1,7}) (.{0,120})$", line)
        if found and found[1].endswith((".py", ".pyx", ".pyi", ">")):
            made.append(CodeFrame(found[1], int(found[2]), found[3]))
    return tuple(reversed(made))


# -- what was going on -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Sign:
    meaning: str
    path: re.Pattern[str]
    function: re.Pattern[str]
    code: re.Pattern[str]

    def at(self, frame: CodeFrame) -> bool:
        return bool(
            self.path.search(frame.path) or self.function.fullmatch(frame.function) or self.code.search(frame.code)
        )


_NEVER = r"(?!)"


def _sign(meaning: str, *, path: str = _NEVER, function: str = _NEVER, code: str = _NEVER) -> _Sign:
    return _Sign(meaning, re.compile(path), re.compile(function), re.compile(code))


_S = r"[/\\]"
_PHASES = (
    _sign("saving", function=r"save_pretrained|_?save_checkpoint|_save|save_model|save_state|_save_optimizer_and_scheduler",
          path=rf"safetensors{_S}torch\.py.*save", code=r"\btorch\.save\(|\.save_pretrained\("),
    _sign("loading", function=r"from_pretrained|_load_pretrained_model|_load_state_dict_into\w*|load_state_dict|"
          r"load_checkpoint\w*|dispatch_model|set_module_tensor_to_device|caching_allocator_warmup|load_model|get_llm",
          path=rf"core_model_loading\.py|model_loader{_S}|safetensors{_S}torch\.py",
          code=r"from_pretrained\(|\bmodel\.(?:to|cuda)\(|\bmodel = .{0,40}\.(?:to|cuda)\("),
    _sign("evaluation", function=r"evaluate|evaluation_loop|prediction_step|predict|eval_ppl\w*|perplexity|validation_step",
          path=rf"lm_eval{_S}", code=r"\.evaluate\("),
    _sign("generation", function=r"generate|_sample|_beam_search|_greedy_search|_prefill",
          path=rf"generation{_S}utils\.py|vllm{_S}", code=r"\.generate\("),
    _sign("calibration", function=r"prepare_calibration_input|prune_\w+|fasterprune|add_batch|calibrate\w*",
          path=rf"lib{_S}prune\.py|{_S}gptq|sparsegpt|jobs{_S}pruning{_S}"),
    _sign("optimizer step", path=rf"torch{_S}optim{_S}|bitsandbytes{_S}optim|apex{_S}optimizers|deepspeed{_S}.*stage",
          function=r"_init_group|_multi_tensor_adamw?|_fused_adamw?|_single_tensor_adamw?",
          code=r"\boptimizer\.step\(|\boptim\.step\("),
    _sign("backward", path=rf"torch{_S}autograd{_S}(?:__init__|graph|function)\.py", function=r"_engine_run_backward|backward",
          code=r"\.backward\("),
    _sign("loss", path=rf"loss_utils\.py|torch{_S}nn{_S}modules{_S}loss\.py|transformers{_S}loss{_S}|cross_entropy",
          function=r"cross_entropy|nll_loss|ForCausalLMLoss|fixed_cross_entropy|compute_logits|log_softmax|kl_div|_lm_loss",
          code=r"cross_entropy\(|loss_function\(|\blm_head\(|logits\.float\(\)|logits = .{0,30}\.float\(|loss_fct\(|"
          r"log_softmax\("),
    _sign("data", path=rf"torch{_S}utils{_S}data{_S}|{_S}datasets{_S}", function=r"pin_memory|collate\w*|default_collate"),
    _sign("forward", function=r"forward|_call_impl|_wrapped_call_impl|training_step|compute_loss"),
)  # fmt: skip
"""In this order: what a stack has anywhere of the first ones decides, for a forward pass is in all of them."""

_AROUND = ("evaluation", "generation", "calibration")
_RECOMPUTE = re.compile(
    rf"torch{_S}utils{_S}checkpoint\.py|gradient_checkpointing|unsloth_zoo{_S}gradient_checkpointing"
)

_HINTS = (
    _sign("logits", path=r"loss_utils\.py|modules[/\\]loss\.py|cross_entropy|transformers[/\\]loss[/\\]",
          function=r"cross_entropy|ForCausalLMLoss|fixed_cross_entropy|nll_loss|log_softmax|compute_logits",
          code=r"\blm_head\(|logits|cross_entropy|log_softmax"),
    _sign("attention", path=r"sdpa_attention\.py|eager_attention|flash_attention",
          function=r"eager_attention_forward|_attn|sdpa_attention_forward|scaled_dot_product_attention|repeat_kv|"
          r"apply_rotary_pos_emb|rotate_half|attention_forward", code=r"attn_weights|attention_scores|softmax\(attn|"
          r"torch\.matmul\(quer|scaled_dot_product_attention|apply_rotary"),
    _sign("attention-mask", path=r"masking_utils\.py|modeling_attn_mask_utils\.py", code=r"causal_mask|attention_mask ="),
    _sign("mlp", code=r"\b(?:gate|up|down)_proj\(|self\.act_fn|self\.c_fc|\bmlp\(|gelu\(|silu\(", path=r"activations\.py"),
    _sign("calibration", function=r"prepare_calibration_input", code=r"\binps = torch\.zeros|outs = torch\.zeros_like\(inps"),
    _sign("hessian", function=r"fasterprune|add_batch", code=r"\bH = |hessian|cholesky"),
    _sign("sort", code=r"torch\.sort\(|\.sort\(|topk\("),
    _sign("kv-cache", path=r"cache_utils\.py", function=r"update|_update_cache|early_initialization|lazy_initialization",
          code=r"past_key_values?\.update|key_cache|StaticCache"),
    _sign("weights", path=rf"torch{_S}optim{_S}|core_model_loading\.py|bitsandbytes{_S}optim",
          function=r"from_pretrained|_init_group|convert|load_state_dict", code=r"zeros_like\(p|exp_avg"),
)  # fmt: skip
_INNERMOST = 6
"""Frames in which a line that works on something is looked for: further out everything is a model's forward."""

_LIBRARIES = re.compile(
    rf"(?:^|{_S})(?:torch|accelerate|lightning|pytorch_lightning|deepspeed|peft{_S}tuners|torch_xla){_S}"
)


def place_from(frames: Sequence[CodeFrame]) -> Place:
    """Frames are outermost first, as Python prints them."""
    if not frames:
        return Place()
    inner = list(reversed(frames))
    phase, because = _phase(inner)
    return Place(
        frames=tuple(frames), phase=phase, because=because, detail=_detail(inner, phase), shown=_shown(inner),
        hints=_hints(inner[:_INNERMOST], phase),
    )  # fmt: skip


def _phase(inner: Sequence[CodeFrame]) -> tuple[str | None, CodeFrame | None]:
    for sign in _PHASES:
        found = next((frame for frame in inner if sign.at(frame)), None)
        if found is None:
            continue
        if sign.meaning == "loss" and not any(sign.at(frame) for frame in inner[:_INNERMOST]):
            continue  # compute_loss of a Trainer is not the loss itself
        return sign.meaning, found
    return None, None


def _detail(inner: Sequence[CodeFrame], phase: str | None) -> str:
    if phase in ("backward", "forward") and any(_RECOMPUTE.search(frame.path) for frame in inner):
        return "computing a checkpointed block again" if phase == "backward" else "in a checkpointed block"
    if phase in _AROUND:
        within = next((sign.meaning for sign in _PHASES if sign.meaning in ("loss", "forward")
                       and any(sign.at(frame) for frame in inner[:_INNERMOST])), "")  # fmt: skip
        return f"in its {within} pass" if within == "forward" else within and "in its loss"
    return ""


def _shown(inner: Sequence[CodeFrame]) -> CodeFrame | None:
    return next((frame for frame in inner if not _LIBRARIES.search(frame.path)), inner[0])


def _hints(inner: Iterable[CodeFrame], phase: str | None) -> frozenset[str]:
    """Of the innermost frame that says anything: an lm_head further out does not make a rotary embedding logits."""
    for frame in inner:
        found = {sign.meaning for sign in _HINTS if sign.at(frame)}
        if found:
            return frozenset(found)
    return frozenset({"weights"}) if phase in ("optimizer step", "loading") else frozenset()


def checkpointed(place: Place) -> bool:
    return any(_RECOMPUTE.search(frame.path) for frame in place.frames)
