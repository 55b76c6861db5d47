"""The model: which weights are trained, what their bytes come to, whether each gets a gradient, and whether it loads.

The model is built as `memfit train` builds it, adapters, checkpointing and loss included: its shapes alone, or its
first blocks with random weights, run on the CPU through two steps of a short text. LoRA's B begins at zero, so that A
has no gradient in the first step: the second one counts.

With `--load` it is really loaded, in a process of its own, and what that took stands beside what was predicted. The
process runs this very file. Its order comes on stdin, and it says in one line of JSON what the loading took:

    {"model": FOLDER, "random": false, "precision": "bf16", "attention": "sdpa", "settings": {}, "device": "cuda"}
"""

from __future__ import annotations

import dataclasses
import gc
import json
import math
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.checking.situation import CannotTell, Finding, Line, Situation
from memfit.errors import MemfitError
from memfit.jobs.training.config import FACTORY, TrainConfig
from memfit.jobs.workload import Workload
from memfit.models.files import NotHere, find_here
from memfit.models.presets import is_gsa
from memfit.recording.machine import NoNvml, host_memory, read_gpus
from memfit.render.pieces import count
from memfit.units import GiB, gib

if TYPE_CHECKING:
    from torch import Tensor, nn

    from memfit.jobs.training.job import TrainJob


TRAINED = Line("model", "trained weights")
ADAPTER = "lora_"
SAVED_WHOLE = "modules_to_save"
"""What peft calls a module that is trained beside the adapters because somebody asked for it."""


def check_trained_weights(situation: Situation) -> Finding:
    model, targets = situation.shapes.get(), situation.config.workload.target_modules
    named = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
    everything = sum(each.numel() for each in model.parameters())
    mine = sum(each.numel() for _, each in named)
    adapters = [name for name, _ in named if ADAPTER in name]
    base = [(name, each) for name, each in named if ADAPTER not in name and SAVED_WHOLE not in name]
    details: dict[str, Any] = {"trained": mine, "parameters": everything, "tensors": len(named)}
    if not named:
        return TRAINED.failed("no weight is trained: all are frozen", "requires_grad_(True) on what should learn")
    if adapters and base:
        size = sum(each.numel() for _, each in base)
        found = f"{count(size)} weights of the base model are trained beside the adapters, such as {base[0][0]}"
        return TRAINED.failed(found, "freeze the base model before the adapters are added", **details, base=size)
    if idle := _targets_without_a_layer(targets, adapters):
        found = f"method.target_modules: no layer is called {', '.join(idle)}"
        advice = f"layers with adapters: {', '.join(sorted(_adapted(adapters)))}"
        return TRAINED.failed(found, advice, **details)
    share = f"{mine:,} of {everything:,} parameters ({mine / everything:.2%})"
    if adapters:
        kinds = ", ".join(sorted(_adapted(adapters)))
        found = f"{share} in {len(adapters) // 2} adapters of {kinds}; the base model is frozen"
        return TRAINED.ok(found, **details)
    frozen = [name for name, each in model.named_parameters() if not each.requires_grad]
    if frozen:
        found = f"{share}; {len(frozen)} tensors are frozen, such as {frozen[0]}"
        return TRAINED.warning(found, "method: full means all", **details)
    return TRAINED.ok(f"{mine:,} parameters, all of them", **details)


def _adapted(adapters: list[str]) -> set[str]:
    """`...q_proj.lora_A.default.weight` adapts q_proj."""
    return {name.split(f".{ADAPTER}")[0].rpartition(".")[2] for name in adapters}


def _targets_without_a_layer(targets: tuple[str, ...] | None, adapters: list[str]) -> list[str]:
    """peft stops only where none of the names matches."""
    adapted = {name.split(f".{ADAPTER}")[0] for name in adapters}
    return [each for each in targets or () if not any(f".{name}".endswith(f".{each}") for name in adapted)]


def bytes_of(weights: Iterable[Tensor]) -> int:
    return sum(each.numel() * each.element_size() for each in weights)


def loading_bytes(model: nn.Module) -> int:
    """All weights, adapters too, as they lie in memory."""
    return bytes_of(model.parameters())


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [each for each in model.parameters() if each.requires_grad]


def state_bytes(model: nn.Module, optimizer: str) -> int:
    """What the optimizer keeps for the trained weights: two of each for Adam, in their own type or in eight bits."""
    return sum(_state_of(each, optimizer) for each in trained(model))


def _state_of(weight: Tensor, optimizer: str) -> int:
    if optimizer == "sgd":
        return 0
    if optimizer == "adafactor":  # fp32 sums over rows and over columns, or one of each number of a vector
        kept = sum(weight.numel() // size for size in weight.shape[-2:]) if weight.dim() > 1 else weight.numel()
        return 4 * kept
    if "4bit" in optimizer:
        return weight.numel()
    if "8bit" in optimizer:
        return 2 * weight.numel()
    return 2 * weight.numel() * weight.element_size()


def checkpoint_bytes(model: nn.Module, config: TrainConfig) -> int:
    """The weights that are trained (LoRA saves its adapters alone), and the optimizer's state."""
    work = config.workload
    weights = bytes_of(trained(model)) if work.kind == "lora" else loading_bytes(model)
    return weights + state_bytes(model, str(work.optimizer))


TOKENS = 16
WORDS = 512
"""Of the vocabulary: how many words there are changes no path of a gradient."""
OF_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id", "unk_token_id")


def small_job(config: TrainConfig, model_name: str, settings: dict[str, Any]) -> TrainJob:
    """The job on the CPU, with short rows of random tokens, and with these settings of the model. All that decides
    which code runs (method, precision, checkpointing, loss) is as it was; flash attention, which no CPU has, is sdpa
    here, and nothing is offloaded."""
    from memfit.jobs.training.loops import training_job

    model = dataclasses.replace(
        config.model,
        name=model_name,
        from_scratch=True,
        settings={**config.model.settings, **settings},
        attention="sdpa" if config.model.attention == "flash_attention_2" else config.model.attention,
    )
    small = dataclasses.replace(config.without_offload(model), device="cpu")
    rows = Workload(kind="train", model=model_name, seq_len=TOKENS)
    job = training_job(rows, WORDS, steps=1, folder=Path())
    return dataclasses.replace(job, config=small)


def shapes_only(config: TrainConfig, model_name: str, *, layers: int | None = None) -> nn.Module:
    """On the meta device: every tensor has its shape and type, and none has memory."""
    import torch

    from memfit.jobs.build import build_for_training

    settings = {} if layers is None else cut_to(config, model_name, layers)
    job = small_job(config, model_name, settings)
    with torch.random.fork_rng(devices=()), torch.device("meta"):
        return build_for_training(job)


def cut_to(config: TrainConfig, model_name: str, layers: int) -> dict[str, Any]:
    """Settings under which the model has only its first so many blocks."""
    if FACTORY.fullmatch(model_name):
        return {}
    if is_gsa(model_name):
        return {"n_layers": layers, "vocab_size": WORDS}
    if model_name.lower().startswith("basics"):
        return {"num_layers": layers, "vocab_size": WORDS}
    from memfit.models.registry import load_config, resolve

    known: Any = load_config(resolve(model_name))
    kinds = getattr(known, "layer_types", None)
    made: dict[str, Any] = {"num_hidden_layers": min(layers, known.num_hidden_layers), "vocab_size": WORDS}
    if isinstance(kinds, list) and not isinstance(getattr(type(known), "layer_types", None), property):
        made["layer_types"] = kinds[:layers]
    made |= {name: None for name in OF_TOKENS if isinstance(getattr(known, name, None), int)}
    return made


def few_blocks(config: TrainConfig, model_name: str, *, most_bytes: int) -> tuple[nn.Module, TrainJob, int]:
    """Its first two blocks in host memory, or only the first where two are too much."""
    from memfit.checking.repeated_weights import RepeatedWeights
    from memfit.jobs.build import build_for_training

    for layers in (2, 1):
        if bytes_to_train(shapes_only(config, model_name, layers=layers)) <= most_bytes:
            job = small_job(config, model_name, cut_to(config, model_name, layers))
            with RepeatedWeights():
                return build_for_training(job), job, layers
    raise CannotTell("one block of this model is more than this machine's free memory")


def bytes_to_train(model: nn.Module) -> int:
    """Weights, and gradients of those that are trained."""
    return loading_bytes(model) + bytes_of(trained(model))


# -- gradients ---------------------------------------------------------------------------------------------------------

GRADIENTS, LOSS = Line("model", "gradient flow"), Line("model", "loss")
STEPS = 2
RATE = 1e-2
SHARE_OF_HOST = 0.5
MOST_BYTES = 4 * GiB
"""Of the host's free memory, what a look may take: to fill more than this with random numbers takes minutes."""
SHOWN = 3
INPUT_GRADS = "checkpointing over a frozen embedding: model.enable_input_require_grads(), or use_reentrant=False"
UNREACHED = f"leave layers that nothing depends on out of target_modules; or {INPUT_GRADS}"
GSA_INDEXER = ".indexer."
NO_GRADIENT = "does not require grad"
"""How torch says that nothing in the loss leads back to a trained weight."""


@dataclass(frozen=True, kw_only=True)
class Flow:
    blocks: int
    tensors: int
    loss: float
    without: tuple[str, ...] = ()
    """Trained tensors that got no gradient, or one of zeros."""
    not_finite: tuple[str, ...] = ()


def follow(situation: Situation) -> Flow:
    """Raises CannotTell where the model is too large for this machine, and whatever the model's own code raises."""
    import torch

    situation.shapes.needed()
    host = host_memory()
    most = min(int(SHARE_OF_HOST * (host["total_bytes"] - host["used_bytes"])), MOST_BYTES)
    with torch.random.fork_rng(devices=()), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of checkpointing, on inputs without gradients: that is what is looked for
        torch.manual_seed(situation.config.seed)
        model, job, blocks = few_blocks(situation.config, situation.model_name, most_bytes=most)
        trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
        if not trained:
            raise CannotTell("no weight is trained")
        loss = _steps(model, _within_vocabulary(model, job.collate([job.data[0]])), list(trained.values()), job.config)
    gradients = {name: each.grad for name, each in trained.items()}
    return Flow(
        blocks=blocks,
        tensors=len(trained),
        loss=loss,
        without=tuple(name for name, each in gradients.items() if each is None or not each.count_nonzero()),
        not_finite=tuple(name for name, each in gradients.items() if each is not None and not each.isfinite().all()),
    )


def _steps(model: nn.Module, batch: dict[str, Tensor], trained: list[nn.Parameter], config: TrainConfig) -> float:
    """The last step's loss; its gradients stay."""
    import torch

    from memfit.checking.repeated_weights import ProductsByFp32

    amp = config.workload.precision.startswith("amp-")
    optimizer = torch.optim.SGD(trained, lr=RATE)
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        with ProductsByFp32():  # type: ignore[no-untyped-call,unused-ignore]
            with torch.autocast("cpu", torch.bfloat16) if amp else nullcontext():
                loss = _loss(model, batch)
            torch.autograd.backward(loss)
        if step < STEPS:
            optimizer.step()
    return float(loss.detach())


def _loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    from torch.nn.functional import cross_entropy

    from memfit.jobs.build import takes_labels

    if takes_labels(model):
        loss: Tensor = model(**batch).loss
        return loss
    made: Any = model(batch["input_ids"])
    logits = made.logits if hasattr(made, "logits") else made
    return cross_entropy(logits[:, :-1].flatten(0, 1).float(), batch["labels"][:, 1:].flatten())


def _within_vocabulary(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """A factory's model may know fewer words than the rows have."""
    from torch import nn

    tables = [each.num_embeddings for each in model.modules() if isinstance(each, nn.Embedding)]
    words = max(tables, default=1 << 31)
    return {name: each.where(each < words, each % words) for name, each in batch.items()}


def check_gradients(situation: Situation, followed: list[Flow]) -> Iterator[Finding]:
    """What it finds is also put into `followed`, for the checks that come after."""
    try:
        flow = follow(situation)
    except (MemfitError, CannotTell, ImportError):
        raise
    except Exception as error:  # the model may be somebody's own code, which raises what it likes
        yield _stopped(error)
        return
    followed.append(flow)
    yield _of_loss(flow)
    what = _what(situation, flow)
    details: dict[str, Any] = {
        "tensors": flow.tensors, "without_gradient": list(flow.without), "not_finite": list(flow.not_finite),
        "blocks": flow.blocks,
    }  # fmt: skip
    if flow.not_finite:
        yield GRADIENTS.failed(f"{_some(flow.not_finite)} not finite in {what}", "bf16 or fp32", **details)
        return
    adapters = [name for name in flow.without if ADAPTER in name]
    none = len(flow.without) == flow.tensors
    missed = f"no gradient reaches {len(flow.without)} of {flow.tensors} trained tensors"
    if adapters or none:
        found = f"{missed} in {what}: {_some(flow.without)}"
        yield GRADIENTS.failed(found, INPUT_GRADS if none else UNREACHED, **details)
    elif flow.without and is_gsa(situation.model_name) and all(GSA_INDEXER in name for name in flow.without):
        some = f"{flow.tensors - len(flow.without)} trained tensors get finite gradients other than zero in {what}"
        indexer = f"the {len(flow.without)} of GSA's indexer get none, for a choice of keys has no gradient"
        yield GRADIENTS.ok(f"{some}; {indexer}", **details)
    elif flow.without:
        found = f"{missed}, which stay as they are: {_some(flow.without)}"
        yield GRADIENTS.warning(found, "freeze them, or find out why nothing depends on them", **details)
    else:
        all_of_them = f"all {flow.tensors} trained tensors get finite gradients other than zero in {what}"
        yield GRADIENTS.ok(all_of_them, **details)


def _what(situation: Situation, flow: Flow) -> str:
    steps = "two steps on the CPU"
    if FACTORY.fullmatch(situation.model_name):
        return steps
    return f"the first {flow.blocks} block{'s' if flow.blocks > 1 else ''}, {steps}"


def _of_loss(flow: Flow) -> Finding:
    loss = flow.loss
    if not math.isfinite(loss):
        found = f"the loss is {loss} in the second step with random weights"
        return LOSS.failed(found, "bf16 or fp32: fp16 ends at 65,504", loss=None)
    return LOSS.ok(f"finite ({loss:.2f} with random weights)", loss=loss)


def _stopped(error: Exception) -> Finding:
    first = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
    if NO_GRADIENT in first:
        return GRADIENTS.failed(f"no gradient reaches any trained weight: '{first}'", INPUT_GRADS)
    return GRADIENTS.failed(f"a training step stops on the CPU: {first}", "the same step would stop on the GPU")


def _some(names: tuple[str, ...]) -> str:
    more = f", and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


# -- loaded ------------------------------------------------------------------------------------------------------------

LOADED = Line("model", "loaded")
PROCESS = "memfit.checking.model"
PATIENCE_SECONDS = 1800.0


def load_and_measure(situation: Situation) -> Finding:
    order = order_of(situation)
    wanted = _bytes_of(order)
    if short := _too_small(situation, wanted, on_gpu=order["device"] == "cuda"):
        return LOADED.failed(short, "a machine with more memory; `memfit plan` needs none", predicted_bytes=wanted)
    took = load_in_a_process(order)
    if "error" in took:
        return LOADED.failed(f"cannot be loaded: {took['error']}", "this is how the run itself would stop", **took)
    return of_loading(took, wanted)


def order_of(situation: Situation) -> dict[str, Any]:
    """What the process is told to load: the files that are here, or the model's code with random weights."""
    config, workload = situation.asked.config, situation.asked.workload
    if workload is not None:
        random = bool(FACTORY.fullmatch(workload.model))
        folder = workload.model if random else _here(workload.model)
        settings: dict[str, Any] = {}
        precision, attention, device = workload.weight_precision, str(workload.attention), "auto"
    elif config is not None:
        random = config.model.starts_from_scratch
        folder = config.model.name if random else _here(config.model.name, config.model.cache_dir)
        settings = dict(config.model.settings)
        precision, attention, device = config.workload.precision, config.model.attention, config.device
    else:
        raise CannotTell("no model is named")
    gpu = situation.here is not None and device != "cpu"
    return {
        "model": folder, "random": random, "precision": precision, "attention": attention, "settings": settings,
        "device": "cuda" if gpu else "cpu",
    }  # fmt: skip


def _here(model: str, cache_dir: str | None = None) -> str:
    try:
        return str(find_here(model, cache_dir=cache_dir))
    except NotHere as error:
        raise CannotTell(f"{error.message}; {error.hint}") from error


def of_loading(took: dict[str, Any], predicted: int) -> Finding:
    where, weights = took["device"], took["weights_bytes"]
    difference = weights - predicted
    beside = f"predicted {gib(predicted)}" + (f", {difference:+,} bytes off" if difference else ", to the byte")
    found = f"weights {gib(weights)} on the {where} in {took['seconds']:.1f} s ({beside})"
    if where == "GPU":
        found += (
            f"; allocated {gib(took['allocated_bytes'])}, reserved {gib(took['reserved_bytes'])},"
            f" device {gib(took['device_bytes'])}"
        )
    found += f"; host at most {gib(took['host_peak_bytes'])}; deleted again"
    details: dict[str, Any] = {**took, "predicted_bytes": predicted}
    if difference:
        return LOADED.warning(found, "other weights than the config of the model says", **details)
    return LOADED.ok(found, **details)


def load_in_a_process(order: dict[str, Any]) -> dict[str, Any]:
    """What the process says of the loading, or `error`."""
    try:
        command = [sys.executable, "-m", PROCESS]
        done = subprocess.run(
            command, input=json.dumps(order), capture_output=True, text=True, timeout=PATIENCE_SECONDS
        )
    except subprocess.TimeoutExpired:
        return {"error": f"not done within {PATIENCE_SECONDS:g} seconds"}
    last = (done.stdout.strip().splitlines() or [""])[-1]
    if done.returncode == 0 and last.startswith("{"):
        made: dict[str, Any] = json.loads(last)
        return made
    if done.returncode < 0:
        return {
            "error": f"the process was ended by signal {-done.returncode}"
            + (" (out of host memory?)" if done.returncode == -signal.SIGKILL else "")
        }
    return {"error": (done.stderr.strip().splitlines() or ["it says nothing"])[-1][:300]}


def _bytes_of(order: dict[str, Any]) -> int:
    """By the shapes alone."""
    import torch

    with torch.device("meta"):
        return loading_bytes(model_of({**order, "random": True}))


def _too_small(situation: Situation, wanted: int, *, on_gpu: bool) -> str | None:
    """A process that takes all of the memory takes others down with it."""
    host = host_memory()
    unused = host["total_bytes"] - host["used_bytes"]
    if wanted > unused:
        return f"weights of {gib(wanted)}, and {gib(unused)} of host memory are free"
    if on_gpu and situation.here is not None and wanted > situation.here.state.free_bytes:
        return f"weights of {gib(wanted)}, and {gib(situation.here.state.free_bytes)} of the GPU are free"
    return None


# -- the process -------------------------------------------------------------------------------------------------------

PAGE = 4096


def load_here(order: dict[str, Any]) -> dict[str, Any]:
    import torch

    from memfit.recording.sampler import ProcessMemory

    host = ProcessMemory()
    before = host.read().used_bytes
    device = torch.device(order["device"])
    began = time.perf_counter()
    model = model_of(order).to(device)
    if device.type == "cuda":
        torch.cuda.synchronize()
    else:
        _touch(model)
    seconds = time.perf_counter() - began
    reading = host.read()
    took: dict[str, Any] = {
        "device": "GPU" if device.type == "cuda" else "CPU", "seconds": seconds,
        "weights_bytes": loading_bytes(model),
        "host_bytes": reading.used_bytes - before, "host_peak_bytes": reading.high_water_bytes or reading.used_bytes,
        **(_of_gpu() if device.type == "cuda" else {}),
    }  # fmt: skip
    del model
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        took["left_bytes"] = torch.cuda.memory_allocated()
    return took


def _touch(model: Any) -> None:
    """Weights of a file are only mapped until somebody reads them: one byte of each page does."""
    import torch

    for each in model.parameters():
        each.detach().view(-1).view(torch.uint8)[::PAGE].sum()


def model_of(order: dict[str, Any]) -> Any:
    """Read from its files, or built with random weights."""
    import torch

    from memfit.jobs.build import build_base_model
    from memfit.jobs.quantised import DTYPES
    from memfit.jobs.training.config import ModelConfig

    random, settings = order["random"], order["settings"]
    attention: Any = "sdpa" if random else order["attention"]
    model = ModelConfig(name=order["model"], from_scratch=True, attention=attention, settings=settings)
    folder = None if random else order["model"]
    return build_base_model(model, folder, DTYPES.get(order["precision"], torch.float32))


def _of_gpu() -> dict[str, Any]:
    """This process's: others may be on the card."""
    import torch

    return {
        "allocated_bytes": torch.cuda.memory_allocated(),
        "reserved_bytes": torch.cuda.memory_reserved(),
        "device_bytes": _held_by_this_process(),
    }


def _held_by_this_process() -> int | None:
    """As the driver sees it, with the context; None where a container hides that."""
    try:
        processes = [process for gpu in read_gpus() for process in gpu.processes]
    except NoNvml:
        return None
    return next((process.used_bytes for process in processes if process.pid == os.getpid()), None)


def main() -> int:
    order = json.loads(sys.stdin.read())
    with redirect_stdout(sys.stderr):
        try:
            took = load_here(order)
        except (MemfitError, RuntimeError, ValueError, OSError, ImportError) as error:
            took = {"error": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"[:300]}
    sys.stdout.write(json.dumps(took) + "\n")
    sys.stdout.flush()
    os._exit(0)  # nothing is left to take down


if __name__ == "__main__":
    main()
