"""How frames of a traceback tell what was going on: by their files, their functions and the words of their code."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

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
        path = frame.inside
        return any(part in path for part in self.paths) or any(
            fnmatchcase(frame.function, name) for name in self.functions
        )


def _sign(meaning: str, *, paths: str = "", functions: str = "", code: str = "") -> Sign:
    return Sign(meaning, tuple(paths.split()), tuple(functions.split()), tuple(code.split(" | ")) if code else ())


PHASES = (
    _sign(
        "saving",
        functions="save_pretrained save_checkpoint _save_checkpoint _save save_model save_state _save_optimizer*",
        code="torch.save( | .save_pretrained(",
    ),
    _sign(
        "loading",
        paths="/core_model_loading.py /model_loader/ /safetensors/torch.py",
        functions="from_pretrained _load_pretrained_model _load_state_dict_into* load_state_dict load_checkpoint* "
        "dispatch_model set_module_tensor_to_device caching_allocator_warmup load_model get_llm flatten_tensors "
        "_load_optimizer*",
        code="from_pretrained( | torch.load( | model.to( | model.cuda(",
    ),
    _sign(
        "evaluation",
        paths="/lm_eval/",
        functions="evaluate evaluation_loop prediction_step predict eval_ppl* perplexity validation_step",
        code=".evaluate(",
    ),
    _sign(
        "generation",
        paths="/generation/utils.py /vllm/ /sglang/ /comfy/ /diffusers/pipelines/",
        functions="generate _sample _beam_search _greedy_search _prefill",
        code=".generate(",
    ),
    _sign(
        "calibration",
        paths="/lib/prune.py /gptq /sparsegpt /jobs/pruning/",
        functions="prepare_calibration_input prune_* fasterprune add_batch calibrate*",
    ),
    _sign(
        "optimizer step",
        paths="/torch/optim/ /bitsandbytes/optim/ /apex/optimizers/ /deepspeed/runtime/zero/stage /utils/clip_grad.py",
        functions="_init_group _multi_tensor_adam* _fused_adam* _single_tensor_adam*",
        code="optimizer.step( | optim.step(",
    ),
    _sign(
        "backward",
        paths="/torch/autograd/__init__.py /torch/autograd/graph.py /torch/autograd/function.py",
        functions="_engine_run_backward backward unpack_hook recompute_fn",
        code=".backward(",
    ),
    _sign(
        "loss",
        paths="/loss_utils.py /torch/nn/modules/loss.py /transformers/loss/ cross_entropy",
        functions="cross_entropy nll_loss ForCausalLMLoss fixed_cross_entropy compute_logits log_softmax kl_div",
        code="cross_entropy( | loss_function( | lm_head( | logits.float() | loss_fct( | log_softmax(",
    ),
    _sign("data", paths="/torch/utils/data/ /datasets/", functions="pin_memory collate* default_collate"),
    _sign(
        "forward",
        paths="/transformers/models/",
        functions="forward _call_impl _wrapped_call_impl training_step compute_loss *attention_forward _conv_forward "
        "dequantize_4bit",
    ),
)
"""In this order: what a stack has anywhere of the first ones decides, for a forward pass is in all of them."""

HINTS = (
    _sign(
        "logits",
        paths="/loss_utils.py /nn/modules/loss.py /transformers/loss/ cross_entropy",
        functions="*cross_entropy ForCausalLMLoss nll_loss log_softmax compute_logits convert_to_fp32",
        code="lm_head( | logits | cross_entropy | log_softmax",
    ),
    _sign(
        "attention",
        functions="eager_attention_forward _attn attention_forward",
        code="attn_weights | attention_scores | softmax(attn | matmul(quer | q @ k | scaled_dot_product_attention(",
    ),
    _sign(
        "attention-output",
        paths="/sdpa_attention.py /flash_attention /flash_attn",
        functions="sdpa_attention_forward scaled_dot_product_attention repeat_kv apply_rotary_pos_emb rotate_half",
        code="scaled_dot_product_attention | apply_rotary | rotate_half",
    ),
    _sign("convolution", paths="/nn/modules/conv.py", code="conv1d( | conv2d( | conv3d("),
    _sign("attention-mask", paths="/masking_utils.py /modeling_attn_mask_utils.py", code="causal_mask"),
    _sign(
        "mlp",
        paths="/activations.py",
        code="gate_proj( | up_proj( | down_proj( | self.act_fn | self.c_fc | mlp( | gelu( | silu(",
    ),
    _sign("calibration", functions="prepare_calibration_input", code="inps = torch.zeros | zeros_like(inps"),
    _sign("hessian", functions="fasterprune add_batch", code="hessian | cholesky | self.H "),
    _sign("sort", code="torch.sort( | .sort( | topk("),
    _sign(
        "kv-cache",
        paths="/cache_utils.py",
        functions="_update_cache early_initialization lazy_initialization *kv_cache*",
        code="kv_cache | past_key_values.update | past_key_value.update | key_cache | StaticCache",
    ),
    _sign(
        "weights",
        paths="/torch/optim/ /core_model_loading.py /bitsandbytes/optim/ /distributed/fsdp/",
        functions="from_pretrained _init_group convert load_state_dict __deepcopy__ get_delta_weight dequantize_4bit",
        code="zeros_like(p | exp_avg",
    ),
)
"""What the failing line works on."""

ENGINES = _sign("engines", paths="/vllm/ /sglang/ /comfy/ /diffusers/")
"""Programs that arrange memory their own way: what memfit predicts is not what they do."""
COLLECTING = _sign("collecting", paths="/trainer_pt_utils.py", functions="nested_concat")
"""Logits of several batches, joined for the metrics."""
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
