"""What `explain` concludes: the cause by its numbers, the phase by its frames, advice given and advice withheld."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from memfit.explaining.explain import WHOLE_TEXT, Explanation, explain, next_steps
from memfit.units import GiB, MiB

pytestmark = pytest.mark.usefixtures("shared_traces")


def message(
    *, asked: str = "1.16 GiB", capacity: str = "23.64 GiB", free: str = "512.00 MiB", own: str = "22.83 GiB",
    others: dict[int, str] | None = None, allowed: str | None = None, allocated: str = "21.93 GiB",
    pools: str | None = None, cached: str = "300.25 MiB",
) -> str:  # fmt: skip
    process = "".join(f"Process {pid} has {size} memory in use. " for pid, size in (others or {}).items())
    mine = f"Including non-PyTorch memory, this process has {own} memory in use. " if own else ""
    limit = f"{allowed} allowed; " if allowed else ""
    private = f", with {pools} allocated in private pools (e.g., CUDA Graphs)" if pools else ""
    return (
        f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {asked}. GPU 0 has a total capacity of "
        f"{capacity} of "
        f"which {free} is free. {process}{mine}{limit}Of the allocated memory {allocated} is allocated by "
        f"PyTorch{private}, "
        f"and {cached} is reserved by PyTorch but unallocated."
    )


def told(text: str | None = None, **given: Any) -> Explanation:
    return explain(message() if text is None else text, predict=False, **given)


def traps(found: Explanation) -> set[str]:
    return {trap.kind for trap in found.traps}


def advice(found: Explanation) -> dict[str, str]:
    return {each.advice: each.why for each in found.withheld}


# -- the cause -------------------------------------------------------------------------------------------------------


def test_a_plain_shortage_says_by_how_much_and_who_holds_it() -> None:
    found = told()
    assert found.cause.kind == "shortage"
    assert found.cause.short_bytes == pytest.approx(1.16 * GiB - 512 * MiB, abs=6 * MiB)
    assert found.cause.sentence == (
        "The GPU was full: 1.16 GiB was asked for and 512.00 MiB was free, 675.84 MiB too little; this process holds "
        "22.83 GiB of 23.64 GiB, 21.93 GiB of it in live tensors."
    )


def test_the_parts_add_up_to_the_card() -> None:
    account = told().account
    rows = {row.name: row.nbytes for row in account.rows()}
    assert sum(rows.values()) == account.whole_bytes
    assert rows["outside torch"] == pytest.approx(0.607 * GiB, abs=20 * MiB)
    assert rows["rest"] == pytest.approx(0.31 * GiB, abs=20 * MiB)


def test_the_parts_add_up_without_processes_too() -> None:
    account = told(message(own="")).account
    assert sum(row.nbytes for row in account.rows()) == account.whole_bytes


def test_other_processes_are_the_cause_if_it_would_fit_without_them() -> None:
    found = told(message(own="2.00 GiB", allocated="1.20 GiB", others={77: "20.00 GiB"}))
    assert found.cause.kind == "other-processes" and "20.00 GiB" in found.cause.sentence
    assert found.fixes[0].basis == "message" and "77" in found.fixes[0].says


def test_a_display_server_is_not_the_cause() -> None:
    found = told(message(others={77: "118.00 MiB"}, asked="600.00 MiB"))
    assert found.cause.kind == "shortage"
    assert "118.00 MiB" in advice(found)["ending other processes"]


def test_a_memory_fraction_is_told_from_a_full_card() -> None:
    found = told(message(asked="48.00 MiB", capacity="139.80 GiB", free="133.11 GiB", own="6.68 GiB",
                         allowed="6.00 GiB", allocated="5.76 GiB", cached="198.88 MiB"))  # fmt: skip
    assert found.cause.kind == "limit" and "6.00 GiB" in found.cause.sentence
    assert found.cause.fragmentation is not None and found.cause.fragmentation.verdict == "cannot tell"
    assert "ending other processes" in advice(found)


def test_a_request_above_the_card_is_impossible_and_no_allocator_setting_helps() -> None:
    found = told(
        message(asked="64.00 GiB", capacity="15.99 GiB", own="3.00 GiB", allocated="2.30 GiB", free="12.00 GiB")
    )
    assert found.cause.kind == "impossible-request"
    assert "no arrangement" in advice(found)["expandable_segments:True"]


def test_free_memory_that_is_refused_is_said_and_not_explained_away() -> None:
    found = told(message(free="6.00 GiB", own="16.00 GiB", allocated="15.00 GiB"))
    assert found.cause.kind == "refused" and "free-but-refused" in traps(found)
    assert "cannot be told" in found.cause.sentence and "do not print" in found.cause.sentence
    cut = told(message(free="6.00 GiB", own="16.00 GiB", allocated="15.00 GiB").partition("Of the")[0])
    assert cut.cause.kind == "refused" and "part of the message that is missing" in cut.cause.sentence


def test_private_pools_are_the_cause_if_they_hold_what_is_missing() -> None:
    assert told(message(pools="1.20 GiB")).cause.kind == "private-pools"
    assert told(message(pools="12.00 MiB")).cause.kind == "shortage"


def test_fragmentation_is_never_claimed_from_text_alone() -> None:
    little = told().cause.fragmentation
    assert little is not None and little.verdict == "no"
    found = told(message(cached="2.50 GiB", allocated="19.70 GiB"))
    assert found.cause.fragmentation is not None and found.cause.fragmentation.verdict == "cannot tell"
    assert "expandable_segments:True" not in advice(found)
    assert any("snapshot" in step for step in found.to_json()["next"])


# -- traps -----------------------------------------------------------------------------------------------------------


def test_in_a_container_the_own_process_is_found_by_its_size() -> None:
    found = told(message(own="", others={91241: "22.83 GiB"}))
    assert found.account.own_by_size == 91241 and "own-process-by-size" in traps(found)
    assert found.cause.kind == "shortage"


@pytest.mark.parametrize("size", ["17179869184.00 GiB", "0 bytes"])
def test_a_size_that_the_driver_does_not_know_is_never_subtracted(size: str) -> None:
    found = told(message(others={7: size}))
    assert "process-size-unknown" in traps(found) and found.account.others_bytes == 0


def test_more_allocated_than_the_card_has_is_windows_spilling() -> None:
    found = told(message(capacity="8.00 GiB", free="0 bytes", own="", allocated="13.98 GiB"))
    assert "spilled" in traps(found) and "no-processes" in traps(found)


def test_many_bare_contexts_are_ranks_on_the_wrong_card() -> None:
    found = told(message(own="5.00 GiB", allocated="4.00 GiB", others={3000 + i: "1.19 GiB" for i in range(15)}))
    assert "ranks-on-one-card" in traps(found)


def test_parts_that_are_more_than_the_card_are_said() -> None:
    assert "does-not-add-up" in traps(told(message(others={7: "9.00 GiB"})))


def test_the_segment_of_small_requests_is_not_taken_for_the_tensor() -> None:
    found = told(message(asked="20.00 MiB", free="10.00 MiB"))
    assert "segment" in traps(found) and not found.readings.candidates


def test_what_comes_after_an_nccl_timeout_may_be_a_consequence() -> None:
    before = "[E1114] ProcessGroupNCCL.cpp: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12)\n"
    assert "after-nccl-timeout" in traps(told(before + message()))
    corrupt = told(f"{message()}\n{before}RuntimeError: CUDA out of memory. Tried to allocate more than 1EB memory.")
    assert corrupt.oom is not None and not corrupt.oom.over_an_exabyte  # the first message is explained instead
    alone = told(f"{before}RuntimeError: CUDA out of memory. Tried to allocate more than 1EB memory.")
    assert alone.cause.kind == "corrupt-size" and "consequence" in alone.cause.sentence


def test_an_error_that_the_program_survived_is_called_that() -> None:
    assert "handled" in traps(told(message() + "; the step is run again with micro_batch_size 2 instead of 4"))


# -- the phase -------------------------------------------------------------------------------------------------------

TORCH = "/venv/lib/python3.12/site-packages/torch"
HF = "/venv/lib/python3.12/site-packages/transformers"


def traceback(*frames: tuple[str, str, str]) -> str:
    lines = [f'  File "{path}", line 7, in {function}\n    {code}' for path, function, code in frames]
    return "\n".join(["Traceback (most recent call last):", *lines, message()])


MAIN = ("/home/me/train.py", "<module>", "main()")
TRAINER = (f"{HF}/trainer.py", "training_step", "loss = self.compute_loss(model, inputs)")
CALL = (f"{TORCH}/nn/modules/module.py", "_call_impl", "return forward_call(*args, **kwargs)")
QWEN = f"{HF}/models/qwen2/modeling_qwen2.py"

PHASES = {
    "loading": [MAIN, (f"{HF}/modeling_utils.py", "from_pretrained", "model = cls(config)"),
                (f"{HF}/core_model_loading.py", "convert", "return tensor.to(device)")],
    "forward": [MAIN, TRAINER, CALL, (QWEN, "forward", "down = self.down_proj(self.act_fn(self.gate_proj(x)))")],
    "loss": [MAIN, TRAINER, CALL, (QWEN, "forward", "loss = self.loss_function(logits, labels)"),
             (f"{HF}/loss/loss_utils.py", "ForCausalLMLoss", "logits = logits.float()")],
    "backward": [MAIN, (f"{HF}/trainer.py", "training_step", "self.accelerator.backward(loss)"),
                 (f"{TORCH}/_tensor.py", "backward", "torch.autograd.backward("),
                 (f"{TORCH}/autograd/graph.py", "_engine_run_backward", "return engine.run_backward(")],
    "optimizer step": [MAIN, (f"{HF}/trainer.py", "_inner_training_loop", "self.optimizer.step()"),
                       (f"{TORCH}/optim/adamw.py", "_init_group", 'state["exp_avg"] = torch.zeros_like(p)')],
    "evaluation": [MAIN, (f"{HF}/trainer.py", "evaluation_loop", "losses, logits = self.prediction_step("), CALL,
                   (QWEN, "forward", "hidden = self.mlp(hidden)")],
    "generation": [MAIN, (f"{HF}/generation/utils.py", "_sample", "outputs = self(**model_inputs)"), CALL],
    "calibration": [MAIN, ("/home/me/wanda/lib/prune.py", "prepare_calibration_input",
                           "inps = torch.zeros((128, model.seqlen, hidden), device=device)")],
    "saving": [MAIN, (f"{HF}/modeling_utils.py", "save_pretrained", "state_dict = {k: v.clone() for k, v in "
                                                                    "d.items()}")],
    "data": [MAIN, (f"{TORCH}/utils/data/_utils/pin_memory.py", "pin_memory", "return data.pin_memory()")],
}  # fmt: skip


@pytest.mark.parametrize("phase", PHASES)
def test_the_phase_is_read_from_the_frames(phase: str) -> None:
    assert told(traceback(*PHASES[phase])).place.phase == phase


def test_a_checkpointed_block_that_is_computed_again_is_backward() -> None:
    frames = [*PHASES["backward"], (f"{TORCH}/utils/checkpoint.py", "recompute_fn", "fn(*args, **kwargs)"), CALL,
              (QWEN, "forward", "x = self.mlp(x)")]  # fmt: skip
    found = told(traceback(*frames))
    assert (found.place.phase, found.place.detail) == ("backward", "computing a checkpointed block again")
    assert "on already" in advice(found)["gradient checkpointing"]


def test_a_step_that_runs_inside_the_optimizers_closure_is_not_the_optimizers() -> None:
    frames = [MAIN, (f"{TORCH}/optim/adamw.py", "step", "loss = closure()"), CALL, (QWEN, "forward", "x = self.mlp(x)")]
    assert told(traceback(*frames)).place.phase == "forward"


def test_the_innermost_line_outside_torch_is_shown_with_its_code() -> None:
    phase = told(traceback(*PHASES["loss"])).to_json()["phase"]
    assert phase["code_line"] == "transformers/loss/loss_utils.py:7 ForCausalLMLoss"
    assert phase["code"] == "logits = logits.float()"


def test_frames_of_other_ranks_do_not_count() -> None:
    mine = [f"[rank1]: {line}" for line in traceback(*PHASES["loss"]).splitlines()]
    others = [f"[rank0]: {line}" for line in traceback(*PHASES["optimizer step"]).splitlines()[:-1]]
    mixed = [line for pair in zip(mine, others + [""] * len(mine), strict=False) for line in pair if line]
    mixed += [line for line in mine if line not in mixed]
    assert told("\n".join(mixed)).place.phase == "loss"


def test_frames_of_ipython_and_rich_are_read() -> None:
    ipython = f"File {HF}/loss/loss_utils.py:55, in ForCausalLMLoss(logits, labels)\n---> 55 logits = logits.float()\n"
    rich = f"│ {HF}/loss/loss_utils.py:55 in ForCausalLMLoss │\n"
    assert told(ipython + message()).place.phase == "loss"
    assert told(rich + message()).place.phase == "loss"


# -- what the text tells of the job ----------------------------------------------------------------------------------


def test_the_model_and_the_run_are_read_in_the_text_and_name_the_tensor() -> None:
    text = "python train.py --model_name_or_path Qwen/Qwen2.5-7B --max_seq_length 2048 --batch_size 1\n"
    found = told(text + traceback(*PHASES["loss"]))
    assert found.job.settings["model"] == "qwen2.5-7b"
    assert (found.job.settings["seq_len"], found.job.settings["batch_size"]) == (2048, 1)
    assert found.readings.likeliest is not None
    assert found.readings.likeliest.product == "1 row x 2,048 tokens x 152,064 vocabulary x 4 bytes"
    assert found.job.read["seq_len"] == "max_seq_length 2048"
    assert found.job.read["model"] == "--model_name_or_path Qwen/Qwen2.5-7B"


def test_a_file_of_the_model_gives_its_family_only() -> None:
    found = told(traceback(*PHASES["loss"]))
    assert "model" not in found.job.settings and {each.family for each in found.job.models} == {"qwen2"}
    assert found.readings.likeliest is None and len(found.readings.candidates) > 1


@pytest.mark.parametrize(
    "said",
    [
        "--model Qwen/Qwen2.5-7B", "model_name_or_path: Qwen/Qwen2.5-7B-Instruct", 'base_model = "unsloth/Qwen2.5-7B"',
        '"_name_or_path": "Qwen/Qwen2.5-7B",', 'AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-7B")',
        "--model_path /data/models/Qwen2.5-7B-Instruct", "loading Qwen2.5-7B on 1 GPU",
    ],
)  # fmt: skip
def test_a_model_is_recognised_however_it_is_named(said: str) -> None:
    assert told(f"{said}\n{message()}").job.settings["model"] == "qwen2.5-7b"


def test_two_models_in_a_log_are_none() -> None:
    found = told(f"teacher Qwen/Qwen2.5-7B student Qwen/Qwen2.5-0.5B\n{message()}")
    assert "model" not in found.job.settings


def test_what_is_given_wins_over_what_is_read() -> None:
    found = told(f"--model gpt2 --seq_len 128\n{message()}", model="qwen2.5-7b", seq_len=2048, batch_size=1)
    assert (found.job.settings["model"], found.job.settings["seq_len"]) == ("qwen2.5-7b", 2048)


def test_what_is_missing_of_the_job_is_asked_for() -> None:
    found = told(model="qwen2.5-7b", kind="lora")
    assert found.job.missing == ("batch_size", "seq_len", "rank")
    assert found.to_json()["next"][0].endswith("add --batch-size N --seq-len N --rank N")


def test_the_rank_of_a_process_is_not_the_rank_of_an_adapter() -> None:
    assert "rank" not in told(f"rank: 3 starting\n{message()}").job.settings


# -- advice that is withheld, row by row ------------------------------------------------------------------------------


def test_emptying_the_cache_never_helps() -> None:
    assert "torch.cuda.empty_cache()" in advice(told())
    assert "torch.cuda.empty_cache()" not in advice(told("CUDA error: out of memory"))  # there it gives room


@pytest.mark.parametrize(
    ("before", "why"),
    [
        ("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True python train.py\n", "on already"),
        (r"C:\Users\me\train.py" + "\n", "Windows"),
        ("export PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:128\n", "max_split_size_mb"),
    ],
)
def test_expandable_segments_are_withheld_where_they_cannot_help(before: str, why: str) -> None:
    enough_cached = message(cached="2.50 GiB", allocated="19.70 GiB")
    assert "expandable_segments:True" not in advice(told(enough_cached))
    assert why in advice(told(before + enough_cached))["expandable_segments:True"]


def test_expandable_segments_are_withheld_where_less_was_cached_than_asked_for() -> None:
    assert "less than was asked for" in advice(told())["expandable_segments:True"]


def test_the_messages_own_suggestion_does_not_count_as_set() -> None:
    suggestion = (
        " If reserved but unallocated memory is large try setting "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid "
        "fragmentation."
    )
    assert not told(message() + suggestion).clues.expandable


def test_split_sizes_are_withheld_without_evidence() -> None:
    assert "max_split_size_mb" in advice(told())


def test_a_smaller_batch_is_withheld_at_one_row_while_loading_and_in_the_optimizer() -> None:
    assert "1 already" in advice(told(batch_size=1))["a smaller batch"]
    assert "loading" in advice(told(traceback(*PHASES["loading"])))["a smaller batch"]
    assert "optimizer" in advice(told(traceback(*PHASES["optimizer step"])))["a smaller batch"]
    assert "a smaller batch" not in advice(told(batch_size=4))


@pytest.mark.parametrize("phase", ["loading", "optimizer step", "evaluation", "generation", "calibration"])
def test_gradient_checkpointing_is_withheld_where_no_activations_are_kept(phase: str) -> None:
    assert "gradient checkpointing" in advice(told(traceback(*PHASES[phase])))


def test_gradient_checkpointing_alone_is_withheld_for_logits() -> None:
    found = told(traceback(*PHASES["loss"]), model="qwen2.5-7b", batch_size=1, seq_len=2048)
    assert "logits" in advice(found)["gradient checkpointing alone"]


def test_a_small_optimizer_is_withheld_for_lora_and_without_an_optimizer() -> None:
    assert "adapters" in advice(told(kind="lora"))["an 8-bit or paged optimizer"]
    assert "no optimizer" in advice(told(traceback(*PHASES["generation"])))["an 8-bit or paged optimizer"]
    assert "an 8-bit or paged optimizer" not in advice(told(traceback(*PHASES["optimizer step"])))


def test_autocast_is_withheld_in_inference_with_fp32_weights() -> None:
    assert "bf16 autocast" in advice(told(kind="generate", precision="fp32"))
    assert "bf16 autocast" not in advice(told(kind="train", precision="fp32"))


def test_ending_other_processes_is_withheld_where_there_are_none() -> None:
    assert advice(told())["ending other processes"] == "the message lists none"
    assert "ending other processes" not in advice(told(message(own="")))  # nobody is listed: nothing is known


def test_flash_attention_is_withheld_in_fp32_and_where_it_is_on() -> None:
    fused = [MAIN, CALL, (f"{HF}/integrations/sdpa_attention.py", "sdpa_attention_forward", "attn = sdpa(")]
    assert "fused already" in advice(told(traceback(*fused)))["flash attention"]
    assert "16-bit" in advice(told(precision="fp32"))["flash attention"]
    assert "flash attention" not in advice(told())


def test_host_memory_gets_no_advice_about_the_gpu() -> None:
    found = told("DefaultCPUAllocator: can't allocate memory: you tried to allocate 68719476736 bytes.")
    assert found.cause.kind == "host-memory" and list(advice(found)) == ["anything about the GPU"]


# -- fixes in words --------------------------------------------------------------------------------------------------


def names(found: Explanation) -> list[str]:
    return [fix.name for fix in found.fixes]


def test_no_saving_is_quoted_that_was_not_predicted() -> None:
    for frames in PHASES.values():
        assert all(fix.saved_bytes is None for fix in told(traceback(*frames)).fixes)


def test_logits_are_answered_with_the_loss_in_chunks() -> None:
    assert names(told(traceback(*PHASES["loss"])))[0] == "the loss in chunks"


def test_scores_are_answered_with_fused_attention() -> None:
    eager = (
        f"{HF}/models/llama/modeling_llama.py",
        "eager_attention_forward",
        "attn_weights = torch.matmul(query, key)",
    )
    text = traceback(MAIN, CALL, eager).replace("1.16 GiB", "2.00 GiB")
    assert "fused attention" in names(told(text, model="llama-2-7b", seq_len=4096, batch_size=1))


def test_a_calibration_buffer_is_answered_with_its_size_at_a_usual_length() -> None:
    text = traceback(*PHASES["calibration"]).replace("1.16 GiB", "64.00 GiB")
    (cap,) = (fix for fix in told(text, model="llama-3.2-1b").fixes if fix.basis == "arithmetic")
    assert "1.00 GiB" in cap.says and "2,048" in cap.name


def test_a_text_without_an_error_says_so_and_advises_nothing() -> None:
    found = told("step 400, loss 2.31")
    assert not found.known and not found.fixes and not found.withheld
    assert found.cause.sentence == "There is no out-of-memory message here."
    assert "whole text" in found.to_json()["next"][0]


# -- the pruning guide's own error -------------------------------------------------------------------------------------

GUIDE = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 64.00 GiB."
GUIDE_RUN = f"""$ python main.py --model meta-llama/Llama-3.2-1B --prune_method wanda --sparsity_ratio 0.5
Traceback (most recent call last):
  File "/home/u/wanda/main.py", line 69, in main
    prune_wanda(args, model, tokenizer, device, prune_n=prune_n, prune_m=prune_m)
  File "/home/u/wanda/lib/prune.py", line 68, in prepare_calibration_input
    inps = torch.zeros((128, model.seqlen, model.config.hidden_size), dtype=dtype, device=device)
{GUIDE}
"""
BUFFER = "128 samples x 131,072 tokens x 2,048 hidden x 2 bytes"


def test_the_pruning_guides_error_alone_lists_the_calibration_buffer_first() -> None:
    found = told(GUIDE)
    first = found.readings.candidates[0]
    assert first.product == BUFFER and first.models == ("llama-3.2-1b",)
    assert found.readings.likeliest is None  # of a job of which nothing is known
    (cap,) = (fix for fix in found.fixes if fix.basis == "arithmetic")
    assert cap.says.startswith("if a model is being pruned") and "1.00 GiB" in cap.says
    assert "in llama-3.2-1b" in str(found)


def test_no_model_is_named_for_a_row_that_is_longer_than_it_can_take() -> None:
    scores = [each for each in told(GUIDE).readings.candidates if each.tensor == "attention scores"]
    named = {model for reading in scores for model in reading.models}
    assert "qwen3-0.6b" in named and not named & {"gpt2-medium", "llama-2-7b"}


@pytest.mark.parametrize("given", [{}, {"gpu": "24GB"}, {"seq_len": 131072}, {"gpu": "24GB", "seq_len": 131072}])
def test_the_pruning_guides_run_is_predicted_as_it_was_and_at_a_usual_length(given: dict[str, Any]) -> None:
    found = explain(GUIDE_RUN, **given)

    assert found.readings.likeliest is not None and found.readings.likeliest.product == BUFFER
    assert found.plan is not None and found.plan.report.breakdown["calibration"] >= 128 * GiB
    cap, streamed = (fix for fix in found.fixes if fix.basis == "predicted")
    assert (cap.name, cap.changes) == ("cap the length at 2,048", {"seq_len": 2048})
    assert streamed.how["memfit"] == "memfit prune --model llama-3.2-1b --seqlen 2048"
    assert (streamed.after_bytes or 0) < (cap.after_bytes or 0) < 8 * GiB < (cap.saved_bytes or 0)
    said = str(found)
    for untrue in ("16 windows", "512", "no single change", "--seqlen 131072", ", :"):
        assert untrue not in said


def test_pruning_in_another_way_is_proposed_in_that_way() -> None:
    run = GUIDE_RUN.replace("wanda --sparsity_ratio 0.5", "sparsegpt --sparsity_ratio 0.5 --sparsity_type 2:4")
    found = explain(run)

    (streamed,) = (fix for fix in found.fixes if fix.basis == "predicted")
    assert streamed.how["memfit"].endswith("--prune-method sparsegpt --sparsity-type 2:4 --seqlen 2048")
    assert found.plan is None and streamed.saved_bytes is None and "n/a" in str(found)
    assert any("for Wanda only" in note for note in found.notes)


# -- what the text says of the job -----------------------------------------------------------------------------------

TRAINER = """torchrun --nproc_per_node 4 sft.py --model_name_or_path Qwen/Qwen2.5-0.5B
TrainingArguments(bf16=True, gradient_accumulation_steps=8, optim=OptimizerNames.ADAMW_BNB_8BIT, max_seq_length=1024)
tokenizer: model_max_length=131072
  Instantaneous batch size per device = 2
  Total train batch size (w. parallel, distributed & accumulation) = 64
  Gradient Accumulation steps = 8
"""
STEP = 'File "/w/transformers/trainer.py", line 9, in training_step\n    loss.backward()\n'
SAVED = 'File "/w/transformers/trainer.py", line 9, in evaluation_loop\n    self.prediction_step(\n'


def test_a_trainers_log_tells_the_job_of_one_of_its_processes() -> None:
    work = told(f"{TRAINER}Traceback (most recent call last):\n  {STEP}{message()}").job.workload
    assert work is not None
    assert (work.kind, work.batch_size, work.grad_accum, work.world_size) == ("train", 2, 8, 4)
    assert (work.seq_len, work.optimizer, work.precision, work.loop) == (1024, "adamw-8bit", "amp-bf16", "trainer")


def test_autocast_is_over_16_bit_weights_where_there_was_no_room_for_others() -> None:
    text = f"--model Qwen/Qwen2.5-7B --batch_size 1 --seq_len 2048 bf16=True\n{STEP}"
    assert told(text + message(allocated="21.93 GiB")).job.settings["precision"] == "bf16"
    assert told(text + message(allocated="36.00 GiB", capacity="79.15 GiB")).job.settings["precision"] == "amp-bf16"
    assert told(f"dtype=torch.bfloat16 {text}{message()}").job.settings["precision"] == "bf16"


def test_the_batch_of_one_gpu_and_step_is_told_from_that_of_all() -> None:
    deepspeed = '"train_micro_batch_size_per_gpu": 4, "train_batch_size": 256, "gradient_accumulation_steps": 8'
    assert told(f"{deepspeed}\n{message()}").job.settings["batch_size"] == 4
    assert told(f"--batch_size 128 --micro_batch_size 2\n{message()}").job.settings["batch_size"] == 2


def test_what_a_log_says_after_the_error_is_of_the_next_try() -> None:
    again = f"batch_size=8\n{message()}\nretrying with a smaller batch, batch_size=4\nstep 1\n"
    assert told(again).job.settings["batch_size"] == 8
    assert told(f"{again}{message()}").job.settings["batch_size"] == 4


def test_adapters_are_on_the_modules_that_the_log_names_and_a_default_is_told() -> None:
    text = "--model gpt2 LoraConfig(r=8, target_modules=['q_proj', 'v_proj']) batch_size=1 seq_len=128\n"
    assert told(text + message()).job.settings["target_modules"] == ("q_proj", "v_proj")
    assumed = told(text.replace(", target_modules=['q_proj', 'v_proj']", "") + message()).job.assumed
    assert assumed is not None and "target-modules all linear layers" in assumed


def test_savings_of_training_are_not_predicted_for_what_failed_in_evaluation() -> None:
    found = explain(f"{TRAINER}Traceback (most recent call last):\n  {SAVED}{message()}")
    assert found.place.phase == "evaluation" and found.job.workload is not None and found.plan is None
    assert {fix.basis for fix in found.fixes} == {"words"} and "evaluate in smaller pieces" in names(found)
    assert any("failed in evaluation, not in training" in note for note in found.notes)


@pytest.mark.parametrize("text", [
    '  File "/home/u/prune_model.py", line 40, in <module>\n    prune.l1_unstructured(module, "weight", amount=0.5)\n'
    '  File "/site-packages/torch/nn/utils/prune.py", line 160, in apply\n    mask = torch.ones_like(orig)\n',
    "$ python scripts/wanda_prune.py --sparsity 0.5\nPruning layer 3\n",
])  # fmt: skip
def test_a_script_that_prunes_is_not_told_to_halve_its_micro_batch(text: str) -> None:
    message = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 448.00 MiB. GPU 0 has a total capacity of 23.69 "
        "GiB of which 60.00 MiB is free. Including non-PyTorch memory, this process has 23.60 GiB memory in use. Of "
        "the allocated memory 22.31 GiB is allocated by PyTorch, and 50.00 MiB is reserved by PyTorch but unallocated."
    )
    told = str(explain(text + message))
    assert "what helps" in told and "micro-batch" not in told


def test_fixes_that_are_enough_come_first_and_the_cheapest_of_them_before_the_others(tmp_path: Path) -> None:
    from memfit.explaining.fixes import predicted_fixes
    from memfit.fitting.levers import COSTS
    from memfit.gpus import find_gpu
    from memfit.jobs.workload import Workload

    (tmp_path / "config.json").write_text(json.dumps({
        "model_type": "llama", "vocab_size": 128_000, "hidden_size": 256, "intermediate_size": 512,
        "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 4096,
    }))  # fmt: skip
    work = Workload(kind="lora", model=str(tmp_path), batch_size=16, seq_len=2048, rank=8)
    _, fixes = predicted_fixes(work, find_gpu("RTX 4090"))
    enough = [fix for fix in fixes if fix.verdict in ("safe", "tight")]
    assert len({fix.cost for fix in enough}) > 1 and fixes[: len(enough)] == enough
    assert [COSTS.index(fix.cost) for fix in enough] == sorted(COSTS.index(fix.cost) for fix in enough)
    saved = [fix.saved_bytes for fix in fixes[len(enough) :]]
    assert saved == sorted(saved, reverse=True)


def test_a_checkpoint_of_the_memory_log_that_failed_points_to_the_log() -> None:
    told = explain("03_before_pruning:\n  GPU Memory: 13.55 GB\n04_after_pruning:  ERROR!\n")
    assert told.cause.kind == "none"
    assert "memfit report memory_log.csv" in next_steps(told)[0]
    assert next_steps(explain("loading llm model\n")) == [WHOLE_TEXT]
