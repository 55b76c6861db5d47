"""Weights, checkpoints and models by name: shapes reach the GPU, gigabytes are neither read nor written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import memfit
from memfit.errors import MemfitError
from memfit.tracing.outside import LEFT_OUT

SMALL = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
HEAD = """
import json, pathlib
import torch
from torch import nn
def note(**told):
    pathlib.Path("told.json").write_text(json.dumps(told))
"""
LOADED = """
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained({name!r}, {more})
first = next(model.parameters())
where = str(first.device)
model = model.to("cuda")
weights = sum(p.nbytes for p in model.parameters())
import resource
host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
note(host=host, where=where, dtype=str(first.dtype), weights=weights,
     held=torch.cuda.memory_allocated(),
     tied=model.lm_head.weight is model.get_input_embeddings().weight)
"""
GPT2 = """
from transformers import GPT2LMHeadModel
from torch import nn
known = GPT2LMHeadModel.from_pretrained("gpt2").state_dict()
mine = nn.Linear(768, 2304)
with torch.no_grad():
    mine.weight.copy_(known["transformer.h.0.attn.c_attn.weight"].t())
mine.cuda()
note(keys=len(known), shape=list(known["transformer.wte.weight"].shape))
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))

    def run(text: str, *, synthetic_data: bool = False) -> tuple[dict[str, object], memfit.Plan]:
        (tmp_path / "train.py").write_text(HEAD + text)
        plan = memfit.trace_script("train.py", synthetic_data=synthetic_data)
        return json.loads((tmp_path / "told.json").read_text()), plan

    return run


OF_T5 = {"vocab_size": 500, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 1, "num_heads": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    made = tmp_path_factory.mktemp("small")
    LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=True)).to(torch.bfloat16).save_pretrained(made)
    return made


@pytest.mark.parametrize(
    ("more", "dtype", "where"),
    [
        ("", "torch.bfloat16", "cpu"),
        ("dtype=torch.float32", "torch.float32", "cpu"),
        ("device_map='cuda'", "torch.bfloat16", "cuda:0"),
        ("device_map='auto', dtype='float16'", "torch.float16", "cuda:0"),
        ("device_map={'': 0}", "torch.bfloat16", "cuda:0"),
    ],
)
def test_a_folder_s_weights_take_gpu_memory_once_and_host_memory_never(run, folder, more, dtype, where) -> None:  # type: ignore[no-untyped-def]
    told, _ = run(LOADED.format(name=str(folder), more=more))
    assert (told["dtype"], told["where"], told["tied"]) == (dtype, where, True)
    assert told["weights"] <= told["held"] < told["weights"] + 64 * 512


def test_a_name_on_the_hub_is_read_as_the_config_that_memfit_knows(run) -> None:  # type: ignore[no-untyped-def]
    told, plan = run(LOADED.format(name="Qwen/Qwen2.5-7B", more=""))
    assert told["weights"] == 2 * 7_615_616_512 and told["dtype"] == "torch.bfloat16"
    assert told["host"] < 3 << 30
    assert plan.to_json()["peak"]["allocated_bytes"] == pytest.approx(told["weights"], rel=4e-3)
    assert any("Qwen/Qwen2.5-7B: its config as memfit ships it" in note for note in plan.notes)
    assert any(note.startswith("weights that are not on this machine") for note in plan.notes)


def test_weights_that_do_not_fit_stay_on_a_host_that_has_room_whatever_this_one_has(tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    import psutil

    memory = psutil.virtual_memory()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory._replace(available=1 << 20))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(
        "import torch\nfrom transformers import AutoModelForCausalLM\n"
        "model = AutoModelForCausalLM.from_pretrained('Qwen/Qwen2.5-7B', device_map='auto')\n"
        "assert {'cpu', 0} == set(model.hf_device_map.values())\n"
        "with torch.no_grad(): model(torch.ones(1, 8, dtype=torch.long, device='cuda'))\n"
    )
    plan = memfit.trace_script("train.py", gpu="8 GB")
    (told,) = (note for note in plan.notes if note.startswith("not modelled: the host's memory"))
    kept = float(told.split("enough for ")[1].split(" GiB")[0])
    assert kept + plan.report.breakdown["weights"] / 2**30 == pytest.approx(2 * 7_615_616_512 / 2**30, abs=0.02)


def test_known_weights_are_copied_into_a_model_of_one_s_own(run) -> None:  # type: ignore[no-untyped-def]
    told, plan = run(GPT2)
    assert told["shape"] == [50257, 768]
    assert any("keep the values they were made with" in note for note in plan.notes)


HEAVY = """
import resource, torch
from transformers import AutoConfig, AutoModelForCausalLM
model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("Qwen/Qwen2.5-7B"), dtype=torch.float32)
assert model.lm_head.weight.device.type == "cpu" and model.lm_head.weight.requires_grad
assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 6 << 20
model.to("cuda", torch.bfloat16)
"""


def test_a_model_that_a_program_makes_on_the_host_takes_no_memory_there(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(HEAVY)
    plan = memfit.trace_script("train.py")
    assert plan.peak.allocated_bytes == pytest.approx(2 * 7_615_616_512, rel=4e-3)


def test_a_program_may_write_its_own_files_beside_a_model_that_it_saves(tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(
        "import pathlib\nfrom transformers import AutoConfig, GPT2LMHeadModel\n"
        "config = AutoConfig.from_pretrained('gpt2')\nconfig.n_layer = 1\n"
        "GPT2LMHeadModel(config).cuda().save_pretrained('out/step_1', max_shard_size='100GB')\n"
        "pathlib.Path('out/step_1/state.json').write_text('{}')\n"
    )
    plan = memfit.trace_script("train.py")
    assert LEFT_OUT in plan.notes and [each.name for each in Path("out/step_1").iterdir()] == ["state.json"]


def test_what_a_script_saves_it_loads_again(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    told, _ = run("""
import io
model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512)).cuda()
model[1].weight = model[0].weight
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(4, 512, device="cuda")).sum().backward()
optimizer.step()
states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
torch.save({**states, "step": 7, "ids": torch.arange(5)}, "c.pt")
held = torch.cuda.memory_allocated()
found = torch.load("c.pt", map_location="cpu")
host = torch.cuda.memory_allocated() - held
there = torch.load("c.pt")
gpu = torch.cuda.memory_allocated() - held
model.load_state_dict(found["model"])
optimizer.load_state_dict(found["optimizer"])
kept = io.BytesIO()
torch.save(found["ids"], kept)
kept.seek(0)
one, other = there["model"]["0.weight"], there["model"]["1.weight"]
note(step=found["step"], ids=torch.load(kept).tolist(), host=host, gpu=gpu, where=str(one.device),
     shared=one.data_ptr() == other.data_ptr())
""")
    assert (told["step"], told["ids"], told["host"], told["shared"]) == (7, [0, 1, 2, 3, 4], 0, True)
    weights = 4 * (512 * 512 + 2 * 512)
    assert told["where"] == "cuda:0" and 3 * weights <= told["gpu"] < 3 * weights + 32 * 512
    assert not (tmp_path / "c.pt").exists()


def test_labels_and_edges_in_a_file_are_known_and_decide_sizes(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    import torch

    graph = """
kept = torch.load("graph.pt")
classes = int(kept["labels"].max()) + 1
note(classes=classes, held=(torch.zeros(classes, device="cuda") + kept["labels"].cuda().max()).shape[0])
"""
    torch.save({"labels": torch.arange(5000) % 7, "x": torch.zeros(5000, 8)}, tmp_path / "graph.pt")
    told, _ = run(graph)
    assert told == {"classes": 7, "held": 7}


@pytest.mark.parametrize(
    ("where", "share"), [("'cpu'", 0), ("'cuda'", 1), ("lambda s, _: s", 0), ("{'cpu': 'cuda:0'}", 1)]
)
def test_a_checkpoint_on_disk_is_read_without_its_numbers(run, tmp_path: Path, where: str, share: int) -> None:  # type: ignore[no-untyped-def]
    import torch

    torch.save({"weights": {"a": torch.zeros(1 << 20), "b": torch.arange(4.0)}, "epoch": 3}, tmp_path / "old.pt")
    told, _ = run(f"""
found = torch.load("old.pt", map_location={where}, weights_only=True)
held = torch.cuda.memory_allocated()
model = nn.Linear(1024, 1024, bias=False).cuda()
model.load_state_dict({{"weight": found["weights"]["a"].view(1024, 1024)}})
note(epoch=found["epoch"], b=found["weights"]["b"].tolist(), held=held)
""")
    assert told["epoch"] == 3 and told["b"] == [0.0, 1.0, 2.0, 3.0]
    assert told["held"] == share * ((4 << 20) + 512)


@pytest.mark.parametrize(
    ("name", "is_reconstructed"), [("EleutherAI/gpt-neo-125m", True), ("HuggingFaceTB/SmolLM-135M", False)]
)
def test_a_config_that_no_public_copy_confirms_is_told_as_reconstructed(
    run: object, name: str, is_reconstructed: bool
) -> None:
    _, plan = run(LOADED.format(name=name, more=""))  # type: ignore[operator]
    told = next(note for note in plan.notes if note.startswith(f"{name}: its config as memfit ships it"))
    assert ("was reconstructed" in told) == is_reconstructed


@pytest.mark.parametrize(
    "kind, name", [("SequenceClassification", "bert-base-uncased"), ("Seq2SeqLM", "google-t5/t5-small")]
)
def test_encoders_and_translators_come_by_their_names_on_the_hub(run: object, kind: str, name: str) -> None:
    told, plan = run(
        f"from transformers import AutoModelFor{kind}\n"
        f"model = AutoModelFor{kind}.from_pretrained({name!r}).cuda()\n"
        "note(weights=sum(p.numel() for p in model.parameters()))"
    )  # type: ignore[operator]
    assert told["weights"] == {"bert-base-uncased": 109_483_778, "google-t5/t5-small": 60_506_624}[name]
    assert any(note.startswith(f"{name}: its config as memfit ships it") for note in plan.notes)


def test_a_folder_with_a_config_alone_has_weights_of_the_shapes_that_it_says(run: object, tmp_path: Path) -> None:
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text(json.dumps({"model_type": "llama", **SMALL}))
    told, plan = run(LOADED.format(name="./llama", more=""))  # type: ignore[operator]
    assert told["weights"] and any(note.startswith("weights that are not on this machine") for note in plan.notes)


@pytest.mark.parametrize("within", ["", "vae"])
def test_so_has_one_of_diffusers(run: object, tmp_path: Path, within: str) -> None:
    pytest.importorskip("diffusers", reason="diffusers is not installed")
    (tmp_path / "whole" / within).mkdir(parents=True)
    (tmp_path / "whole" / within / "config.json").write_text(json.dumps({"_class_name": "AutoencoderKL"}))
    told, plan = run(
        "from diffusers import AutoencoderKL\n"
        f"vae = AutoencoderKL.from_pretrained('whole', subfolder={within!r}, torch_dtype=torch.float16)\n"
        "where = str(next(vae.parameters()).device)\n"
        "sizes = {p.dtype: p.numel() for p in vae.cuda().parameters()}\n"
        "with torch.no_grad():\n"
        "    latent = vae.encode(torch.zeros(1, 3, 64, 64, device='cuda', dtype=torch.float16)).latent_dist.mode()\n"
        "note(where=where, dtypes=[str(each) for each in sizes], shape=list(latent.shape))"
    )  # type: ignore[operator]
    assert told == {"where": "cpu", "dtypes": ["torch.float16"], "shape": [1, 4, 64, 64]}
    assert any(note.startswith("weights that are not on this machine") for note in plan.notes)


@pytest.mark.parametrize("where", ["", "device_map='cuda'"])
@pytest.mark.parametrize("differs", [True, False])
def test_two_weights_of_a_checkpoint_are_one_only_where_the_files_say_that_they_are_equal(
    run: object, tmp_path: Path, where: str, differs: bool
) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(**OF_T5)
    with torch.device("cpu"):
        weights = T5ForConditionalGeneration(config).state_dict()
    kept = {name: each.clone() for name, each in weights.items() if "embed_tokens" not in name}
    kept["lm_head.weight"] += differs
    (tmp_path / "t5").mkdir()
    save_file(kept, tmp_path / "t5" / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "t5" / "config.json").write_text(json.dumps({"model_type": "t5", **OF_T5}))
    told, plan = run(
        "from transformers import T5ForConditionalGeneration\n"
        f"model = T5ForConditionalGeneration.from_pretrained('./t5', {where}).cuda()\n"
        "note(weights=sum(p.numel() for p in model.parameters()))"
    )  # type: ignore[operator]
    assert told["weights"] == sum(each.numel() for each in kept.values()) - (0 if differs else 500 * 64)
    assert not any("are equal" in note for note in plan.notes)


def test_where_a_weight_that_has_no_values_is_not_zero_is_refused_and_no_fault_of_the_job(run: object) -> None:
    with pytest.raises(MemfitError, match=r"train\.py:\d+.*the code asks a float32 tensor for all its values"):
        run(
            "from transformers import AutoModel\n"
            "model = AutoModel.from_pretrained('openai-community/gpt2')\n"
            "print(model.wte.weight.nonzero())"
        )  # type: ignore[operator]


def test_weights_that_are_not_here_are_tied_unless_their_config_says_otherwise(run: object, tmp_path: Path) -> None:
    (tmp_path / "t5").mkdir()
    (tmp_path / "t5" / "config.json").write_text(
        json.dumps({"model_type": "t5", **OF_T5, "tie_word_embeddings": False})
    )
    (tmp_path / "tied").mkdir()
    (tmp_path / "tied" / "config.json").write_text(json.dumps({"model_type": "t5", **OF_T5}))
    told, _ = run(
        "from transformers import AutoModelForSeq2SeqLM\n"
        "def weights(name):\n"
        "    return sum(p.numel() for p in AutoModelForSeq2SeqLM.from_pretrained(name).cuda().parameters())\n"
        "note(apart=weights('./t5'), tied=weights('./tied'))"
    )  # type: ignore[operator]
    assert told["apart"] - told["tied"] == 500 * 64


def test_what_is_missing_is_named_with_its_id_and_no_flag_that_would_not_help(run: object) -> None:
    with pytest.raises(
        MemfitError, match=r"train\.py:\d+: the code loads config\.json of nobody/nothing from the Hub"
    ) as error:
        run(LOADED.format(name="nobody/nothing", more=""))  # type: ignore[operator]
    assert "hf download nobody/nothing" in error.value.hint and "--synthetic-data" not in error.value.hint


@pytest.mark.parametrize("more", ["", "a config alone"])
def test_a_checkpoint_that_is_quantised_already_is_refused_without_its_weights(
    run: object, tmp_path: Path, more: str
) -> None:
    name = "unsloth/Llama-3.2-1B-bnb-4bit"
    if more:
        pytest.importorskip("bitsandbytes")
        (tmp_path / "llama").mkdir()
        stored = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
        config = {"model_type": "llama", **SMALL, "quantization_config": stored}
        (tmp_path / "llama" / "config.json").write_text(json.dumps(config))
        name = "./llama"
    with pytest.raises(MemfitError, match=f"{name} is a checkpoint that is quantised already") as error:
        run(LOADED.format(name=name, more=""))  # type: ignore[operator]
    assert f"memfit plan lora --model {name}" in error.value.hint


def test_a_processor_of_a_model_that_nobody_knows_is_told_without_a_flag_that_would_not_help(
    run: Callable[..., object],
) -> None:
    code = "from transformers import AutoFeatureExtractor\nAutoFeatureExtractor.from_pretrained('nobody/sound')\n"
    with pytest.raises(MemfitError, match="nobody/sound") as error:
        run(code)
    assert "--synthetic-data makes up tokenizers, processors of pictures and sound, and data" in error.value.hint
    with pytest.raises(MemfitError, match="nobody/sound") as error:
        run(code, synthetic_data=True)
    assert "is made up where the model's config is here" in error.value.hint


def test_a_pipeline_comes_by_its_name_with_tokens_of_its_text_model_and_trains(run: object) -> None:
    pytest.importorskip("diffusers", reason="diffusers is not installed")
    told, plan = run(
        "from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel\n"
        "from huggingface_hub import model_info\n"
        "from transformers import AutoTokenizer, CLIPTextModel\n"
        "name = 'stable-diffusion-v1-5/stable-diffusion-v1-5'\n"
        "unet = UNet2DConditionModel.from_pretrained(name, subfolder='unet').cuda()\n"
        "text = CLIPTextModel.from_pretrained(name, subfolder='text_encoder')\n"
        "tokenizer = AutoTokenizer.from_pretrained(name, subfolder='tokenizer')\n"
        "ids = tokenizer('a dog', padding='max_length', truncation=True, return_tensors='pt').input_ids\n"
        "note(trained=sum(p.numel() for p in unet.parameters() if p.requires_grad), ids=list(ids.shape),\n"
        "     text=sum(p.numel() for p in text.parameters()), held=torch.cuda.memory_allocated(),\n"
        "     steps=DDPMScheduler.from_pretrained(name, subfolder='scheduler').config.num_train_timesteps,\n"
        "     has_vae='vae/config.json' in [each.rfilename for each in model_info(name).siblings])",
        synthetic_data=True,
    )  # type: ignore[operator]
    held = told.pop("held")
    assert told == {"trained": 859_520_964, "ids": [1, 77], "text": 123_060_480, "steps": 1000, "has_vae": True}
    assert held // 859_520_964 == 4
    assert any("the configs of its parts as memfit ships them" in note for note in plan.notes)


def test_what_goes_to_the_hub_goes_nowhere_and_the_program_goes_on(run: object) -> None:
    told, plan = run(
        "from huggingface_hub import HfApi, create_repo, upload_folder\n"
        "torch.zeros(1, device='cuda')\n"
        "name = create_repo('mine', exist_ok=True).repo_id\n"
        "upload_folder(repo_id=name, folder_path='.')\n"
        "job = HfApi().upload_folder(repo_id=name, folder_path='.', run_as_future=True)\n"
        "note(name=name, done=job.done())"
    )  # type: ignore[operator]
    assert told == {"name": "you/mine", "done": True}
    assert "what the program sends to the Hub goes nowhere" in plan.notes


def test_a_weight_without_memory_that_is_sent_to_the_host_is_itself_and_can_be_trained(run: object) -> None:
    told, _ = run(
        "weight = nn.Parameter(nn.Linear(8192, 2048).weight.detach())\n"
        "torch.zeros(1, device='cuda')\n"
        "with torch.no_grad():\n"
        "    again, half = weight.to('cpu', non_blocking=False), weight.to(device='cpu', dtype=torch.float16)\n"
        "note(same=again is weight and weight.cpu() is weight, trained=again.requires_grad,\n"
        "     half=str(half.dtype), other=half is weight, copied=weight.to('cpu', copy=True) is weight)"
    )  # type: ignore[operator]
    assert told == {"same": True, "trained": True, "half": "torch.float16", "other": False, "copied": False}


def test_who_asks_the_hub_for_the_config_of_a_shipped_model_by_himself_gets_it(run: object) -> None:
    told, _ = run(
        "from huggingface_hub import hf_hub_download\n"
        "torch.zeros(1, device='cuda')\n"
        "said = json.loads(pathlib.Path(hf_hub_download('prajjwal1/bert-tiny', 'config.json')).read_text())\n"
        "index = hf_hub_download(repo_id='stabilityai/stable-diffusion-xl-base-1.0', filename='model_index.json')\n"
        "note(hidden=said['hidden_size'], kind=said['model_type'],\n"
        "     pipeline=json.loads(pathlib.Path(index).read_text())['_class_name'])"
    )  # type: ignore[operator]
    assert told == {"hidden": 128, "kind": "bert", "pipeline": "StableDiffusionXLPipeline"}
