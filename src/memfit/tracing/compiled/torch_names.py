"""The private names of torch's compiler that memfit takes hold of, and a plain sentence where one is missing."""

from __future__ import annotations

import logging
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace

import torch

from memfit.errors import TraceError

EAGERLY = (
    "plan it without torch.compile (TORCH_COMPILE_DISABLE=1 before the command): the plan is then that of eager mode,"
    " which often needs more"
)
NEEDED = {
    "convert_frame": ("torch._dynamo.convert_frame", "CatchErrorsWrapper ConvertFrameReturn FrameExecStrategy"),
    "eval_frame": ("torch._dynamo.eval_frame", "reset_code _stance DynamoStance"),
    "builder": ("torch._dynamo.variables.builder", "VariableBuilder"),
    "symbolic_shapes": ("torch.fx.experimental.symbolic_shapes", "ShapeEnv"),
    "function_modes": ("torch._dynamo.variables.torch_function", "SymbolicTorchFunctionState"),
    "regions": ("torch._dynamo.variables.ctx_manager", "AutocastModeVariable"),
    "optimizers": ("torch._dynamo.variables.optimizer", "_is_static_for_cudagraphs OptimizerVariable"),
    "dynamo_utils": ("torch._dynamo.utils", "clear_torch_function_mode_stack run_node set_torch_function_mode_stack"),
    "gradients": ("torch._functorch.eager_transforms", "_autograd_grad"),
    "dynamo_config": ("torch._dynamo.config", ""),
    "compiled_autograd": ("torch._dynamo.compiled_autograd", "compiled_autograd_enabled"),
    "dynamo_exceptions": ("torch._dynamo.exc", "SkipFrame"),
    "dynamo_types": ("torch._dynamo.types", "FrameAction"),
    "known_shapes": ("torch._dynamo.pgo", "_CODE_STATE _INIT_CODE_STATE"),
    "device_interface": ("torch._dynamo.device_interface", "CudaInterface"),
    "compile_fx": ("torch._inductor.compile_fx",
                   "compile_fx partition_fn compile_fx_forward compile_fx_backward InductorError _warn_tf32_disabled"),
    "graph": ("torch._inductor.graph", "GraphLowering"),
    "scheduler": ("torch._inductor.scheduler", ""),
    "select_algorithm": ("torch._inductor.select_algorithm", "PyCodeCache"),
    "inductor_utils": ("torch._inductor.utils", ""),
    "inductor_config": ("torch._inductor.config", ""),
    "async_compile": ("torch._inductor.async_compile", "AsyncCompile"),
    "functorch_config": ("torch._functorch.config", ""),
    "pad_mm": ("torch._inductor.fx_passes.pad_mm", "_should_pad get_do_bench is_padded_faster"),
    "joint_graph": ("torch._inductor.fx_passes.joint_graph", "UniformValueConstantFolder"),
    "misc_patterns": ("torch._inductor.fx_passes.misc_patterns", "_misc_patterns_init"),
    "fake_tensor": ("torch._subclasses.fake_tensor", "FakeTensor init_gpu_context"),
    "flex_attention": ("torch._higher_order_ops.flex_attention", "create_fw_bw_graph"),
    "triton_asked": ("torch.utils._triton", ""),
    "fake_prop": ("torch.fx.passes.fake_tensor_prop", "FakeTensorProp"),
    "module_hooks": ("torch.nn.modules.module", "_global_forward_hooks _global_forward_pre_hooks"),
}  # fmt: skip
"""By what they are called here: the module, and what must be in it (torch 2.11 to 2.13)."""
GUARDS = "_ZN3c104impl26device_guard_impl_registryE"
"""The table of device guards in libc10: an entry for each kind of device."""
DEVICE_KINDS, KIND_CUDA, KIND_META = 22, 1, 14


@cache
def compiler() -> SimpleNamespace:
    """The modules of `NEEDED`; to be called where no mode is on."""
    found, logged = SimpleNamespace(), logging.root.manager.disable
    logging.disable(logging.WARNING)  # modules say as they are imported that triton is not here
    try:
        _import_all(found)
    finally:
        logging.disable(logged)
    return found


def _import_all(found: SimpleNamespace) -> None:
    for short, (module, names) in NEEDED.items():
        try:
            owner = import_module(module)
        except ImportError as error:
            raise missing(module) from error
        for name in names.split():
            if not hasattr(owner, name):
                raise missing(f"{module}.{name}")
        setattr(found, short, owner)


def missing(name: str) -> TraceError:
    return TraceError(
        f"memfit does not cover torch.compile of torch {torch.__version__}: there is no {name}, where 2.11 to 2.13"
        " have it",
        hint=EAGERLY,
    )


def is_triton_here() -> bool:
    return find_spec("triton") is not None
