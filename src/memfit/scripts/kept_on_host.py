"""Weights that a device_map leaves on the host: room for them is for the machine of the job to have."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from memfit.units import format_bytes

ENOUGH = 1 << 50
"""Otherwise what this machine has free at the moment would decide whether weights go to its disk."""
PLACES_WEIGHTS = "accelerate.utils.modeling"


@contextmanager
def host_has_room(tracer: Any) -> Iterator[None]:
    """accelerate asks psutil for the host's memory, and its hooks take the weights that are to stay there."""
    kept, done = [0], set[str]()
    with ExitStack() as stack:

        def patch() -> None:
            psutil: Any = sys.modules.get("psutil")
            if hasattr(psutil, "virtual_memory") and "psutil" not in done:
                done.add("psutil")
                stack.enter_context(mock.patch.object(psutil, "virtual_memory", _enough(psutil.virtual_memory)))
            hooks: Any = sys.modules.get("accelerate.hooks")
            if hasattr(hooks, "AlignDevicesHook") and "hooks" not in done:
                done.add("hooks")
                kind = hooks.AlignDevicesHook
                stack.enter_context(mock.patch.object(kind, "init_hook", _counted(kind.init_hook, kept)))

        patch()
        tracer.after_import.append(patch)
        try:
            yield
        finally:
            tracer.after_import.remove(patch)
            if kept[0]:
                tracer.assume(
                    f"not modelled: the host's memory, taken to be enough for {format_bytes(kept[0])} of weights that"
                    " a device_map keeps there: they are copied to the card each time that they are used"
                )


def _enough(memory: Callable[[], Any]) -> Callable[[], Any]:
    def virtual_memory() -> Any:
        found = memory()
        asked_by = sys._getframe(1).f_globals.get("__name__")
        return found._replace(available=ENOUGH) if asked_by == PLACES_WEIGHTS else found

    return virtual_memory


def _counted(begin: Callable[..., Any], kept: list[int]) -> Callable[..., Any]:
    def init_hook(hook: Any, module: Any) -> Any:
        if hook.offload:
            kept[0] += sum(each.numel() * each.element_size() for each in module.parameters(hook.place_submodules))
        return begin(hook, module)

    return init_hook
