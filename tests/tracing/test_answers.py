"""Values that the code asks of a tensor: answered by the place that asks, or an error that names it."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from memfit.errors import TraceError
from memfit.tracing.answers import KNOWN, Answers, Site
from memfit.tracing.tracer import Tracer, trace

HERE = "tests/tracing/test_answers.py"


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype, device="cuda")


def if_tensor() -> None:
    if zeros(1, dtype=torch.bool).all():
        pass


def item() -> None:
    zeros(1).item()


def as_int() -> None:
    int(zeros(1, dtype=torch.int64))


def as_float() -> None:
    float(zeros(1))


def as_index() -> None:
    list(range(10))[zeros(1, dtype=torch.int64)]


def while_tensor() -> None:
    while zeros(1) > 0:
        pass


QUESTIONS = [if_tensor, item, as_int, as_float, as_index, while_tensor]


@pytest.mark.parametrize("ask", QUESTIONS)
def test_an_unknown_question_is_an_error_that_names_file_line_and_function(ask: Callable[[], None]) -> None:
    with pytest.raises(TraceError) as caught:
        trace(lambda _: ask())
    line = ask.__code__.co_firstlineno + 1
    assert f"{HERE}:{line}, in {ask.__name__}:" in caught.value.message


def test_the_error_says_what_was_asked_and_what_to_do() -> None:
    with pytest.raises(TraceError, match="asks an int64 tensor for its value") as caught:
        trace(lambda _: as_int())
    line = as_int.__code__.co_firstlineno + 1
    assert f"--answer test_answers.py:{line}=true" in str(caught.value.hint)
    assert 'answers={("test_answers.py", "as_int"): True}' in str(caught.value.hint)


def two_questions() -> tuple[bool, bool]:
    first = bool(zeros(1).any())
    second = bool(zeros(1).all())
    return first, second


def test_a_function_that_asks_twice_is_answered_by_the_line_that_asks() -> None:
    said: list[tuple[bool, bool]] = []
    table = {Site(HERE, "two_questions", ".all()"): True, Site(HERE, "two_questions"): False}

    trace(lambda _: said.append(two_questions()), answers=Answers(table))

    assert said == [(False, True)]


def as_list() -> None:
    zeros(3, dtype=torch.int64).tolist()


def on_the_host() -> None:
    zeros(3).cpu()


@pytest.mark.parametrize("ask", [as_list, on_the_host])
def test_code_that_takes_all_values_to_the_host_is_named(ask: Callable[[], None]) -> None:
    with pytest.raises(TraceError, match="for all its values") as caught:
        trace(lambda _: ask())
    assert f"{HERE}:{ask.__code__.co_firstlineno + 1}, in {ask.__name__}:" in caught.value.message


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float32, torch.float64])
def test_no_dtype_has_a_default(dtype: torch.dtype) -> None:
    with pytest.raises(TraceError):
        trace(lambda _: zeros(1, dtype=dtype).item())


def test_a_question_of_backward_is_an_error_too() -> None:
    def job(_: Tracer) -> None:
        x = torch.zeros(3, device="cuda", requires_grad=True)
        x.register_hook(lambda gradient: gradient.sum().item())
        x.exp().sum().backward()

    with pytest.raises(TraceError, match=HERE):
        trace(job)


def test_tensors_of_the_host_answer_for_themselves() -> None:
    seen: list[Any] = []
    trace(lambda _: seen.append(torch.tensor([3.0, 4.0]).sum().item()))
    assert seen == [7.0]


# -- answers -----------------------------------------------------------------------------------------------------------


def ask_twice() -> list[Any]:
    return [zeros(1).item(), bool(zeros(1) > 0)]


def test_a_caller_s_answer_is_what_the_code_gets() -> None:
    seen: list[Any] = []
    trace(lambda _: seen.extend(ask_twice()), answers=Answers({Site(HERE, "ask_twice"): 0}))
    assert seen == [0, False]


def test_a_callable_is_asked_each_time_and_given_the_tensor() -> None:
    seen: list[Any] = []
    asked: list[torch.dtype] = []
    numbers = iter([7, 1])

    def answer(tensor: torch.Tensor) -> int:
        asked.append(tensor.dtype)
        return next(numbers)

    trace(lambda _: seen.extend(ask_twice()), answers=Answers({Site(HERE, "ask_twice"): answer}))
    assert (seen, asked) == ([7, True], [torch.float32, torch.bool])


def test_an_answer_holds_for_its_function_only() -> None:
    with pytest.raises(TraceError, match="in item"):
        trace(lambda _: item(), answers=Answers({Site(HERE, "ask_twice"): 0}))


def test_an_answer_holds_for_its_file_only() -> None:
    with pytest.raises(TraceError, match="in item"):
        trace(lambda _: item(), answers=Answers({Site("other/test_answers.py", "item"): 0}))


def calls_another() -> None:
    item()


def test_an_answer_is_not_for_what_its_function_calls() -> None:
    with pytest.raises(TraceError, match="in item"):
        trace(lambda _: calls_another(), answers=Answers({Site(HERE, "calls_another"): 0}))


def test_a_person_s_folder_may_be_called_torch() -> None:
    names: dict[str, Any] = {"torch": torch}
    exec(compile("def ask():\n    torch.zeros(1, device='cuda').item()\n", "/home/me/torch/train.py", "exec"), names)
    with pytest.raises(TraceError, match=re.escape("/home/me/torch/train.py:2, in ask")):
        trace(lambda _: names["ask"]())


def test_what_was_answered_can_be_read_afterwards() -> None:
    answers = Answers({Site(HERE, "item"): 5})
    trace(lambda _: item(), answers=answers)
    assert list(answers.given.values()) == [5]
    assert f"{HERE}:{item.__code__.co_firstlineno + 1}" in next(iter(answers.given))


# -- known places ------------------------------------------------------------------------------------------------------


OPTIONAL = ("bitsandbytes", "linear_operator", "torchmetrics")
"""`make test-all` installs them."""


def functions_of(file: Path) -> set[str]:
    tree = ast.parse(file.read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}


@pytest.mark.parametrize("site", sorted(KNOWN, key=str), ids=lambda site: site.function)
def test_every_known_place_is_in_the_installed_library(site: Site) -> None:
    library, _, inside = site.file.partition("/")
    found = find_spec(library)
    if library in OPTIONAL and found is None:
        pytest.skip(f"{library} is not installed")
    assert found is not None and found.submodule_search_locations
    assert site.function in functions_of(Path(found.submodule_search_locations[0]) / inside)


def llama_with_mask(tracer: Tracer) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=100, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float16, attn_implementation="sdpa").to("cuda")
    ids = torch.ones(2, 48, dtype=torch.int64, device="cuda")
    tracer.trace.mark("forward")
    with torch.no_grad():
        model(input_ids=ids, attention_mask=torch.ones_like(ids))


MASK_BYTES = 2 * 1 * 48 * 48
"""A bool for each pair of positions of both sequences."""


def test_transformers_is_told_that_nothing_is_padded() -> None:
    answers = Answers()
    made = trace(llama_with_mask, answers=answers)
    assert set(answers.given.values()) == {True}
    assert MASK_BYTES not in made.requested


def test_a_caller_s_answer_goes_before_a_known_one() -> None:
    padded = Answers({Site("transformers/masking_utils.py", "_ignore_causal_mask_sdpa"): False})
    assert MASK_BYTES in trace(llama_with_mask, answers=padded).requested
