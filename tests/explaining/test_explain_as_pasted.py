"""Errors as people paste them: from notebooks, engines, other backends, web pages and schedulers, whole or in part."""

from __future__ import annotations

import bz2
import gzip
import html
import io
import lzma
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.oom_messages import find_oom

from memfit.errors import InputError
from memfit.explaining.explain import Explanation, explain
from memfit.explaining.message import find_ooms
from memfit.explaining.text import excerpt_of

SIZES = {
    "requested": "350.00 MiB", "capacity": "23.68 GiB", "free": "212.81 MiB", "allocated": "22.61 GiB",
    "unallocated": "1.03 MiB",
}  # fmt: skip


def message(asked: str = "350.00 MiB", *, allocated: str = "22.61 GiB", cached: str = "1.03 MiB") -> str:
    return (
        f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {asked}. GPU 0 has a total capacity of "
        "23.68 GiB of which 212.81 MiB is free. Including non-PyTorch memory, this process has 23.00 GiB memory in "
        f"use. Of the allocated memory {allocated} is allocated by PyTorch, and {cached} is reserved by PyTorch but "
        "unallocated."
    )


def told(text: str, **given: Any) -> Explanation:
    return explain(text, predict=False, **given)


def sizes(found: Explanation) -> dict[str, str]:
    assert found.oom is not None
    return {name: size.text for name, size in found.oom.sizes().items() if size is not None}


def fixes(found: Explanation) -> list[str]:
    return [fix.name for fix in found.fixes]


def withheld(found: Explanation) -> dict[str, str]:
    return {each.advice: each.why for each in found.withheld}


def frame(path: str, function: str, code: str) -> str:
    return f'  File "{path}", line 7, in {function}\n    {code}\n'


# -- notebooks -------------------------------------------------------------------------------------------------------

OLD_NOTEBOOK = """RuntimeError                              Traceback (most recent call last)
<ipython-input-23-0a1b2c3d> in <module>()
      1 for epoch in range(10):
----> 2     train(model, loader)

<ipython-input-22-abcdef> in train(model, loader)
     10         out = model(x)
---> 11         loss.backward()
     12         optimizer.step()

/usr/local/lib/python3.7/dist-packages/torch/tensor.py in backward(self, gradient, retain_graph, create_graph)
    184
--> 185         torch.autograd.backward(self, gradient, retain_graph, create_graph)

RuntimeError: CUDA out of memory. Tried to allocate 1.53 GiB (GPU 0; 14.76 GiB total capacity; 12.24 GiB already \
allocated; 1.27 GiB free; 12.44 GiB reserved in total by PyTorch)"""

COLAB = f"""OutOfMemoryError                          Traceback (most recent call last)
/tmp/ipython-input-3-123.py in <cell line: 0>()
----> 2 trainer.train()

5 frames
/usr/local/lib/python3.11/dist-packages/transformers/trainer.py in training_step(***failed resolving arguments***)
   3735             kwargs["scale_wrt_gas"] = False
-> 3736         self.accelerator.backward(loss, **kwargs)
   3737

{message()}"""

JUPYTER = f"""File [~/env/lib/python3.11/site-packages/transformers/cache_utils.py:49](http://host/utils.py#line=48), \
in DynamicCache.update(self, key_states)
     46 if self.keys is None:
---> 49     self.keys = torch.cat([self.keys, key_states], dim=-2)
     50 return self.keys

{message()}"""


@pytest.mark.parametrize(
    ("text", "phase", "line", "code"),
    [
        (OLD_NOTEBOOK, "backward", "<ipython-input-22-abcdef>:11 train", "loss.backward()"),
        (
            COLAB, "backward", "transformers/trainer.py:3736 training_step",
            "self.accelerator.backward(loss, **kwargs)",
        ),
        (
            JUPYTER, None, "transformers/cache_utils.py:49 DynamicCache.update",
            "self.keys = torch.cat([self.keys, key_states], dim=-2)",
        ),
    ],
)  # fmt: skip
def test_a_notebooks_arrow_marks_the_failing_line(text: str, phase: str | None, line: str, code: str) -> None:
    found = told(text).to_json()["phase"]
    assert (found["name"], found["code"]) == (phase, code)
    assert found["code_line"].endswith(line)


# -- web pages and loggers -------------------------------------------------------------------------------------------


def test_what_a_web_page_has_escaped_is_read_with_its_frames() -> None:
    plain = frame("/w/modeling_llama.py", "forward", "logits = self.lm_head(h)") + message()
    escaped = f"<pre><code>{html.escape(plain)}</code></pre>".replace("350.00 MiB", "<b>350.00</b>&nbsp;MiB")
    found = told(escaped.replace(" is free. ", " is free.<br/>\n"))
    assert sizes(found) == SIZES and found.place.phase == "loss"
    assert found.to_json()["phase"]["code"] == "logits = self.lm_head(h)"


def test_pythons_own_angle_brackets_are_not_taken_for_html() -> None:
    text = "<p>it fails</p>\n" + frame("/w/t.py", "<module>", "loss.backward()") + message()
    assert told(text).place.frames[0].function == "<module>"


@pytest.mark.parametrize(
    "prefix",
    ["ERROR 04-09 05:39:54 [core.py:390] ", "(EngineCore_DP0 pid=4711) ERROR 11-02 10:11:12 [core.py:708] ",
     "2024-04-27 10:13:05 | ERROR | stderr | "],
)  # fmt: skip
def test_an_engines_prefix_does_not_get_into_the_code(prefix: str) -> None:
    text = frame("/w/train.py", "main", "loss.backward()") + message()
    found = told("".join(prefix + line + "\n" for line in text.splitlines()))
    assert sizes(found) == SIZES and found.to_json()["phase"]["code"] == "loss.backward()"


# -- parts of a message ----------------------------------------------------------------------------------------------


def test_of_a_message_without_its_beginning_the_rest_is_read() -> None:
    found = told(message().partition("this process has")[2])
    assert sizes(found) == {"allocated": "22.61 GiB", "unallocated": "1.03 MiB"}
    assert "what was asked for is not in the text" in found.cause.sentence and "22.61 GiB" in found.cause.sentence


def test_a_number_whose_beginning_is_lost_is_not_read() -> None:
    cut = message().partition("2")[2].partition("Of the allocated memory 2")[2]
    assert cut.startswith("2.61 GiB is allocated")
    found = told(cut)
    assert "allocated" not in (sizes(found) if found.oom else {})


def test_without_what_was_free_the_card_is_not_called_full() -> None:
    found = told("torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 14.00 GiB")
    assert found.cause.sentence == "The GPU had no room for 14.00 GiB; how much was free is not in the text."


@pytest.mark.parametrize(
    "text",
    [
        "RuntimeError: cuda runtime error (2) : out of memory at /pytorch/aten/src/THC/generic/THCStorage.cu:58",
        "RuntimeError: CUDA runtime error (2): out of memory at /pytorch/aten/src/THC/THCGeneral.cpp:70",
        "torch.OutOfMemoryError: Allocation on device \n\nGot an OOM, unloading all loaded models.",
    ],
)
def test_a_form_without_numbers_is_known_for_what_it_is(text: str) -> None:
    found = told(text)
    assert found.cause.kind == "no-numbers" and found.oom is not None and found.oom.form in ("cuda", "cuda-async")


# -- other backends --------------------------------------------------------------------------------------------------


def test_an_accelerator_with_the_allocator_of_cuda_is_read_by_its_name() -> None:
    text = (
        "RuntimeError: NPU out of memory. Tried to allocate 1.16 GiB (NPU 3; 60.97 GiB total capacity; 58.77 GiB "
        "already allocated; 58.77 GiB current active; 812.00 MiB free; 59.20 GiB reserved in total by PyTorch)"
    )
    found = told(text)
    assert found.oom is not None and (found.oom.form, found.oom.device) == ("npu", 3)
    assert sizes(found)["free"] == "812.00 MiB" and "torch.npu.empty_cache()" in withheld(found)


def test_a_gpu_that_shares_the_machines_memory_is_not_called_too_small() -> None:
    text = (
        "HIP out of memory. Tried to allocate 16.00 GiB. GPU 0 has a total capacity of 15.49 GiB of which 84.98 GiB "
        "is free. Of the allocated memory 1.67 GiB is allocated by PyTorch, and 8.08 GiB is reserved by PyTorch but "
        "unallocated."
    )
    found = told(text)
    assert found.cause.kind == "refused" and "shared-memory" in {trap.kind for trap in found.traps}
    assert found.account.whole_bytes is None and all(row.nbytes >= 0 for row in found.account.rows())


def test_an_intel_gpu_that_refuses_a_large_block_has_its_limit_named() -> None:
    text = (
        "XPU out of memory. Tried to allocate 8.00 GiB. GPU 0 has a total capacity of 15.11 GiB. Of the allocated "
        "memory 0 bytes is allocated by PyTorch, and 0 bytes is reserved by PyTorch but unallocated."
    )
    assert "block-limit" in {trap.kind for trap in told(text).traps}
    assert "block-limit" not in {trap.kind for trap in told(text.replace("8.00 GiB", "1.71 GiB")).traps}


@pytest.mark.parametrize(
    ("text", "certainty", "words"),
    [
        ("ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`", "certain",
         "vLLM"),
        ("ValueError: Free memory on device (9.21/23.68 GiB) on startup is less than desired GPU memory utilization "
         "(0.9, 21.31 GiB).", "certain", "vLLM"),
        ("(16.00 GiB KV cache is needed, which is larger than the available KV cache memory (5.43 GiB).", "certain",
         "max_model_len"),
        ("RuntimeError: No executable batch size found, reached zero.", "likely", "every size"),
        ("RuntimeError: level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)", "certain",
         "Intel"),
        ("RuntimeError: Native API failed. Native API returns: -5 (PI_ERROR_OUT_OF_RESOURCES)", "likely", "Intel"),
        ("RuntimeError: Current platform can NOT allocate memory block with size larger than 4GB! Tried to allocate "
         "6.85 GiB (GPU  0; 15.56 GiB total capacity; 0 bytes already allocated)", "certain", "4 GiB"),
        ("[METAL] Command buffer execution failed: Insufficient Memory "
         "(00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)", "certain", "Mac"),
        ("RuntimeError: Invalid buffer size: 18.00 GB", "certain", "Metal"),
        ("RuntimeError: HIP error: out of memory", "certain", "outside torch"),
        ("XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 bytes.", "certain",
         "without torch"),
        ("OOM when allocating tensor with shape[16,112,112,147] and type float", "certain", "without torch"),
        ("allocating 8192.00 MiB on device 0: cudaMalloc failed: out of memory", "certain", "without torch"),
        ("triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 147456", "certain",
         "not the card's memory"),
        ("RuntimeError: cuFFT error: CUFFT_ALLOC_FAILED", "certain", "library"),
        ("RuntimeError: CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`", "certain",
         "library"),
        ("RuntimeError: Unable to find a valid cuDNN algorithm to run convolution", "likely", "convolution"),
        ("Your session crashed after using all available RAM.", "certain", "notebook"),
        ("Your notebook tried to allocate more memory than is available. It has restarted.", "certain", "notebook"),
        ("ray.exceptions.OutOfMemoryError: Task was killed: node running low on memory", "certain", "cluster"),
        ("OSError: The paging file is too small for this operation (os error 1455)", "certain", "page file"),
        ("java.lang.OutOfMemoryError: Java heap space", "certain", "Java"),
        ("terminate called after throwing an instance of 'std::bad_alloc'", "certain", "Host memory"),
        ("RuntimeError: unable to mmap 4999802720 bytes from file <model.safetensors>: Cannot allocate memory (12)",
         "certain", "Host memory"),
        ("slurmstepd: error: Detected 1 oom_kill event in StepId=4242.batch.", "certain", "host memory"),
        ("srun: error: node17: task 0: Out Of Memory", "certain", "host memory"),
    ],
)  # fmt: skip
def test_an_error_of_another_program_is_told_by_its_own_words(
    text: str, certainty: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = told(f"step 4\n{text}\n")
    assert found.oom is not None and (found.oom.form, found.oom.certainty) == ("disguised", certainty)
    assert words in found.cause.sentence and found.fixes[0].says == found.oom.remedy
    monkeypatch.setattr("memfit.explaining.text.SMALL_TEXT", 1 << 16)
    filler = "step 1, loss 2.31\n" * 3641
    assert find_oom(f"{filler}{text}\n{filler[:20_000]}") == found.oom  # in a text that is not read whole


def test_an_error_that_is_not_about_memory_is_none() -> None:
    assert find_oom("Error an illegal memory access was encountered at line 90 in file /src/csrc/ops.cu") is None
    assert find_oom("RESOURCE_EXHAUSTED: Quota exceeded for quota metric 'requests'") is None


def test_a_process_that_was_killed_is_not_said_to_have_spared_the_gpu() -> None:
    assert "raises an error" in withheld(told("traceback : Signal 9 (SIGKILL) received by PID 4242"))[
        "anything about the GPU"
    ]  # fmt: skip


# -- serving engines -------------------------------------------------------------------------------------------------

VLLM = frame("/opt/vllm/v1/worker/gpu_model_runner.py", "_allocate_kv_cache_tensors", "tensor = torch.zeros(size)")


def test_an_engines_error_gets_the_engines_advice_and_no_prediction() -> None:
    found = told(f"vllm serve --model Qwen/Qwen2.5-7B --max-model-len 4096\n{VLLM}{message()}")
    assert found.place.phase == "generation" and fixes(found) == ["a smaller engine", "vLLM's share of the card"]
    assert found.job.workload is None and not found.job.missing and found.job.beyond in found.notes


def test_a_size_alone_does_not_make_a_key_value_cache_an_activation() -> None:
    assert not told(VLLM + message("642.00 MiB")).readings.candidates


def test_a_picture_made_by_diffusion_is_not_trained() -> None:
    text = frame("C:\\ComfyUI\\comfy\\ldm\\modules\\attention.py", "forward", "x = self.ff(self.norm3(x))") + message()
    found = told(text)
    assert fixes(found) == ["need less"] and "gradient checkpointing" in withheld(found)


# -- advice that follows the line ------------------------------------------------------------------------------------

TORCH, HF = "/venv/site-packages/torch", "/venv/site-packages/transformers"
STEP = frame("/w/train.py", "main", "optimizer.step()")


def test_a_softmax_in_fp32_does_not_make_the_job_fp32() -> None:
    code = "attn_weights = nn.functional.softmax(attn_weights, dim=-1, dtype=torch.float32).to(query.dtype)"
    found = told(frame(f"{HF}/models/llama/modeling_llama.py", "eager_attention_forward", code) + message("2.00 GiB"))
    assert "precision" not in found.job.settings and "flash attention" not in withheld(found)
    assert found.place.phase == "forward" and "fused attention" in fixes(found)


def test_a_dtype_that_the_model_is_loaded_with_is_its_precision() -> None:
    code = 'model = AutoModelForCausalLM.from_pretrained("gpt2", dtype=torch.float32)'
    assert told(frame("/w/t.py", "main", code) + message()).job.settings["precision"] == "fp32"


def test_scores_that_sdpa_has_made_are_not_called_fused() -> None:
    code = "attn_output = torch.nn.functional.scaled_dot_product_attention("
    text = frame(f"{HF}/integrations/sdpa_attention.py", "sdpa_attention_forward", code) + message("2.00 GiB")
    found = told(text, model="llama-2-7b", batch_size=1, seq_len=4096)
    assert found.readings.likeliest is not None and found.readings.likeliest.tensor == "attention scores"
    assert "flash attention" not in withheld(found)
    (fix,) = (each for each in found.fixes if each.name == "fused attention")
    assert "kernels out" in fix.says


def test_compiled_code_spells_out_the_shape_that_failed() -> None:
    code = "buf12 = empty_strided_cuda((4096, 152064), (152064, 1), torch.float32)"
    found = told(frame("/tmp/torchinductor_u/ab/cabcd.py", "call", code) + message("2.32 GiB")).readings.likeliest
    assert found is not None and found.kind == "logits"
    assert found.product == "4,096 tokens x 152,064 vocabulary x 4 bytes"
    code = code.replace("4096, 152064", "300, 7, 99991")
    other = told(frame("/tmp/torchinductor_u/ab/cabcd.py", "call", code) + message("802.00 MiB")).readings.likeliest
    assert other is not None and other.product == "300 x 7 x 99,991 x 4 bytes"


def test_compiled_code_is_named_and_planned_as_such() -> None:
    code = "buf12 = empty_strided_cuda((4096, 152064), (152064, 1), torch.float32)"
    text = frame("/tmp/torchinductor_u/ab/cabcd.py", "call", code) + message("2.32 GiB")
    assert told(text).place.detail == "in code that torch.compile generated"
    given = {"kind": "train", "model": "qwen2.5-0.5b", "batch_size": 4, "seq_len": 1024}
    work = told(text, **given).job.workload
    assert work is not None and work.compile
    assert "compiled" in str(told(text).job.beyond)


def test_a_kernel_that_is_timed_is_told_from_the_step_itself() -> None:
    code = "buffer = torch.empty(self.L2_cache_size // 4, dtype=torch.int)"
    text = frame("/tmp/torchinductor_u/ab/cabcd.py", "call", "triton_poi_fused_0.run(arg0, 4096)") + frame(
        f"{TORCH}/_inductor/runtime/benchmarking.py", "benchmark_gpu", code
    )
    found = told(text + message("60.00 MiB"))
    assert found.place.detail.startswith("timing a generated kernel")
    assert "keep torch's cache of compiled kernels" in fixes(found)


def test_a_training_step_in_the_optimizers_closure_is_a_loss_where_it_makes_the_loss() -> None:
    text = frame(f"{TORCH}/optim/adamw.py", "step", "loss = closure()") + frame(
        "/w/my.py", "training_step", "return F.cross_entropy(self(x), y)"
    )
    assert told(text + message()).place.phase == "loss"


def test_temporaries_of_the_optimizer_are_answered_with_a_fused_one() -> None:
    foreach = frame(f"{TORCH}/optim/adamw.py", "_multi_tensor_adamw", "exp_avg_sq_sqrt = torch._foreach_sqrt(sqs)")
    states = frame(f"{TORCH}/optim/adamw.py", "_init_group", 'state["exp_avg"] = torch.zeros_like(')
    assert fixes(told(STEP + foreach + message())) == ["a fused optimizer", "smaller optimizer states"]
    assert fixes(told(STEP + states + message())) == ["smaller optimizer states"]
    assert "optimizer" in withheld(told(STEP + states + message(), batch_size=1))["a smaller batch"]


def test_a_copy_of_the_weights_is_not_answered_with_a_smaller_batch() -> None:
    found = told(frame(f"{TORCH}/nn/parameter.py", "__deepcopy__", "self.data.clone()") + message())
    assert fixes(found) == ["on the host"] and "weights are copied" in withheld(found)["a smaller batch"]


def test_expandable_segments_are_worth_a_try_where_more_was_cached_than_asked_for() -> None:
    enough = message(allocated="18.60 GiB", cached="4.03 GiB")
    assert fixes(told(enough))[0] == "expandable segments"
    assert "expandable segments" not in fixes(told(message()))
    assert "expandable segments" not in fixes(told(f"C:\\Users\\me\\train.py\n{enough}"))


def test_a_size_alone_is_no_reason_to_cut_the_loss_into_chunks() -> None:
    assert "the loss in chunks" not in fixes(told(message("1.16 GiB")))
    loss = frame(f"{HF}/loss/loss_utils.py", "ForCausalLMLoss", "logits = logits.float()")
    assert "the loss in chunks" in fixes(told(loss + message("1.16 GiB")))
    chunked = frame("/w/torchtune/modules/loss/ce_chunked_output_loss.py", "forward", "logits.float(), labels")
    assert "the loss in chunks" not in fixes(told(chunked + message("1.16 GiB")))


def test_a_calibration_has_samples_and_no_batch() -> None:
    code = "inps = torch.zeros((128, model.seqlen, hidden), device=device)"
    found = told(frame("/w/wanda/lib/prune.py", "prepare_calibration_input", code) + message("4.00 GiB"))
    assert "fewer samples" in fixes(found) and not {"a smaller batch", "fewer rows at a time"} & set(fixes(found))


def test_a_model_larger_than_the_card_is_not_a_reading() -> None:
    named = {name for each in told(message("5.06 GiB")).readings.candidates for name in each.models}
    assert named and not named & {"llama-3.1-405b", "llama-2-70b", "opt-66b"}


def test_quantised_weights_name_the_model_and_stop_the_prediction_until_they_are_told() -> None:
    log = (
        'model_name = "unsloth/Qwen2.5-7B-bnb-4bit", load_in_4bit = True\nper_device_train_batch_size=2 '
        "max_seq_length=2048 lora_r=16\n"
    )
    found = told(log + message())
    assert found.job.settings["model"] == "qwen2.5-7b" and found.job.settings["kind"] == "lora"
    assert found.job.workload is None and any("quantised" in note for note in found.notes)
    given = told(log + message(), kind="lora")
    assert given.job.workload is None and any("without --quant" in note for note in given.notes)
    for said in ({"kind": "lora", "quant": "nf4"}, {"kind": "qlora"}):
        work = told(log + message(), **said).job.workload
        assert work is not None and (work.kind, work.quant, work.double_quant) == ("lora", "nf4", "quant" not in said)


def test_a_config_of_axolotl_is_a_job() -> None:
    log = (
        "base_model: Qwen/Qwen2.5-7B\nsequence_len: 8192\nmicro_batch_size: 2\nadapter: lora\nlora_r: 32\nbf16: auto\n"
    )
    work = told(log + message()).job.workload
    assert work is not None and (work.kind, work.rank, work.seq_len, work.precision) == ("lora", 32, 8192, "bf16")


def test_a_job_that_is_sharded_is_not_predicted_as_one_of_a_single_card() -> None:
    log = (
        "torchrun train.py --model_name_or_path Qwen/Qwen2.5-7B --fsdp full_shard --per_device_train_batch_size 2 "
        "--max_seq_length 2048\n"
    )
    text = log + frame(f"{HF}/trainer.py", "training_step", "loss = self.compute_loss(model, inputs)") + message()
    found = told(text)
    assert found.job.settings["kind"] == "train" and found.job.workload is None
    assert any("--parallel fsdp2" in note for note in found.notes)
    given = told(text, kind="train", parallel="fsdp2", world_size=8)
    assert given.job.workload is not None and not given.job.beyond


def test_a_convolution_is_not_taken_for_a_tensor_of_a_language_model() -> None:
    found = told(frame(f"{TORCH}/nn/modules/conv.py", "_conv_forward", "return F.conv2d(") + message("1.00 GiB"))
    assert found.place.phase == "forward" and not found.readings.candidates
    assert "smaller inputs" in fixes(found) and "shorter sequences" not in fixes(found)


def test_saving_has_no_rows_to_save_on() -> None:
    found = told(frame(f"{HF}/trainer.py", "_save", "self.model.save_pretrained(") + message("1.02 GiB"))
    assert fixes(found) == ["save from the host"] and "a smaller batch" in withheld(found)


def test_the_traceback_inside_a_replica_is_the_one_that_counts() -> None:
    inner = frame(f"{HF}/models/bert/modeling_bert.py", "forward", "probs = softmax(attention_scores, dim=-1)")
    text = frame(f"{TORCH}/_utils.py", "reraise", "raise exception") + (
        "torch.OutOfMemoryError: Caught OutOfMemoryError in replica 1 on device 1.\n"
        f"Original Traceback (most recent call last):\n{inner}{message('768.00 MiB')}"
    )
    found = told(text)
    assert found.found is not None and len(found.found.ooms) == 1
    assert [frame.function for frame in found.place.frames] == ["forward"]


# -- all of it is read -------------------------------------------------------------------------------------------------

LINE = "step 1, loss 2.31, 12.3 GiB\n"


def long_log(asked: str = "350.00 MiB", *, before: int, after: int) -> str:
    return f"{LINE * (before // len(LINE))}{message(asked)}\n{LINE * (after // len(LINE))}"


def test_a_message_in_the_middle_of_a_very_long_log_is_found_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text(long_log(before=10 << 20, after=10 << 20))
    found = explain(path, predict=False)
    assert sizes(found) == SIZES and found.found is not None and not found.notes
    assert found.found.last.line == (10 << 20) // len(LINE) + 1


def test_what_is_kept_of_a_log_does_not_grow_with_it() -> None:
    class Endless(io.TextIOBase):
        left, given = 250, 0

        def read(self, size: int | None = -1, /) -> str:
            self.left -= 1
            text = (message() + LINE * 20_000)[: size or 0] if self.left >= 0 else ""
            self.given += len(text)
            return text

    log = Endless()
    excerpt = excerpt_of(log)  # type: ignore[arg-type]
    assert len(excerpt.text) < 60 << 20 < log.given
    found = find_ooms(excerpt)
    assert found.count == 250 > len(found.ooms)
    assert found.last.line == 1 + excerpt.lines_before(len(excerpt.text)) * 249 // 250


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])
def test_a_packed_log_is_read(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    packed = pack(long_log(before=20_000, after=20_000).encode())
    (tmp_path / "train.log.1.gz").write_bytes(packed)
    for source in (tmp_path / "train.log.1.gz", tmp_path, packed, io.BytesIO(packed)):
        assert sizes(explain(source, predict=False)) == SIZES


def test_a_packed_log_that_is_cut_off_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    path = tmp_path / "train.log.gz"
    path.write_bytes(gzip.compress(long_log(before=100, after=5 << 20).encode())[:-1000])
    found = explain(path, predict=False)
    assert sizes(found) == SIZES and "cut off or damaged" in found.notes[0] and "were read" in found.notes[0]


def test_a_file_that_unpacks_without_end_is_read_to_a_limit_that_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memfit.explaining.input.MAX_UNPACKED", 8 << 20)
    path = tmp_path / "bomb.log.gz"
    path.write_bytes(gzip.compress(bytes(64 << 20)))
    found = explain(path, predict=False)
    assert not found.known and "only the first 8.00 MiB were read" in found.notes[0]
    assert found.cause.sentence == "There is no out-of-memory message in what was read."


def test_what_is_no_text_is_refused_and_not_called_free_of_errors(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "logs.zip", "w") as archive:
        archive.writestr("train.log", message())
    with pytest.raises(InputError, match="is a zip archive"):
        explain(tmp_path / "logs.zip", predict=False)
    with pytest.raises(InputError, match="is a snapshot"):
        explain(b"\x80\x04" + bytes(100), predict=False)


def test_logs_in_folders_inside_are_read_and_all_that_have_an_error_are_named(tmp_path: Path) -> None:
    for rank in range(3):
        folder = tmp_path / "attempt_0" / str(rank)
        folder.mkdir(parents=True)
        (folder / "stderr.log").write_text(message() if rank else LINE)
    (tmp_path / "notes.txt").write_text("lr 1e-4\n")
    found = explain(tmp_path, predict=False)
    assert sizes(found) == SIZES and found.source.text_from in ("attempt_0/1/stderr.log", "attempt_0/2/stderr.log")
    assert any(note.startswith("out-of-memory errors are in these too: attempt_0/") for note in found.notes)


def test_a_folder_without_an_error_says_what_was_read(tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text(LINE)
    (tmp_path / "old.log.gz").write_bytes(gzip.compress(LINE.encode()))
    found = explain(tmp_path, predict=False)
    assert not found.known and "read for an out-of-memory error: train.log, old.log.gz" in found.notes
