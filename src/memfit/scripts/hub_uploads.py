"""What a program sends to the Hub goes nowhere, and the program goes on as if it had arrived."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any
from unittest import mock

OWNER = "you"
_SENT = ("upload_folder", "upload_file", "upload_large_folder", "create_commit", "create_tag", "create_branch")
_BY_NAME = ("transformers", "diffusers", "peft", "trl", "accelerate", "sentence_transformers", "huggingface_hub")
"""Packages that may have taken the functions by name before a program began."""


def patches_of_uploads(tracer: Any) -> list[Any]:
    """None before `huggingface_hub` is imported."""
    hub: Any = sys.modules.get("huggingface_hub")
    if hub is None:
        return []
    pretended: dict[str, Callable[..., Any]] = {
        "create_repo": _repository(tracer, hub),
        "whoami": lambda *_, **__: {"type": "user", "name": OWNER, "fullname": OWNER, "orgs": []},
        **{name: _nowhere(tracer) for name in _SENT},
    }
    replaced = []
    for name, instead in pretended.items():
        replaced += everywhere(name, getattr(hub, name), instead)
        replaced.append(mock.patch.object(hub.HfApi, name, _of_class(instead)))
    replaced.append(mock.patch.object(hub, "login", lambda *_, **__: None))
    return replaced


def everywhere(name: str, real: Any, instead: Callable[..., Any]) -> list[Any]:
    """Also where others have taken it by name already."""
    return [
        mock.patch.object(module, name, instead)
        for module_name, module in list(sys.modules.items())
        if module_name.partition(".")[0] in _BY_NAME and getattr(module, "__dict__", {}).get(name) == real
    ]


def _of_class(instead: Callable[..., Any]) -> Callable[..., Any]:
    return lambda _, *args, **kwargs: instead(*args, **kwargs)


def _repository(tracer: Any, hub: Any) -> Callable[..., Any]:
    def create_repo(repo_id: str = "", *_: Any, **__: Any) -> Any:
        _tell(tracer)
        owned = repo_id if "/" in repo_id else f"{OWNER}/{repo_id}"
        return hub.RepoUrl(f"https://huggingface.co/{owned}", endpoint="https://huggingface.co")

    return create_repo


def _nowhere(tracer: Any) -> Callable[..., Any]:
    def sent(*_: Any, run_as_future: bool = False, **__: Any) -> Any:
        _tell(tracer)
        if not run_as_future:
            return None
        done: Future[None] = Future()
        done.set_result(None)
        return done

    return sent


def _tell(tracer: Any) -> None:
    tracer.assume("what the program sends to the Hub goes nowhere")
