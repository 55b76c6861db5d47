"""Reductions that take many registers: torch gives them one configuration more, with shorter rows at a time.

torch looks at the compiled kernel (triton_heuristics.py, `_dynamic_scale_rblock`). triton compiles without a card, so
where it is installed the kernel is compiled here too, and torch's own rule is asked.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

from torch.utils._python_dispatch import _disable_current_modes

REDUCTION = "@triton_heuristics.reduction("
NO_TRITON = (
    "reductions that take many registers are timed on the card as well: which they are only triton tells, and it is not"
    " installed here"
)
DRIVER = "triton_helpers.set_driver_to_gpu()"
REGISTERS = re.compile(r"\bREG:(\d+)")


def is_triton_here() -> bool:
    return find_spec("triton") is not None


def configurations_compiled(source: str) -> int:
    """How many there are once the kernel is compiled. Nothing is left in torch's or triton's cache."""
    codecache = import_module("torch._inductor.codecache")
    helpers = import_module("torch._inductor.runtime.triton_helpers")
    with tempfile.TemporaryDirectory() as folder:
        caches = {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": folder}
        with (
            _disable_current_modes(),
            mock.patch.dict(os.environ, caches),
            mock.patch.object(helpers, "set_driver_to_gpu", lambda *_: None),
        ):
            module = codecache.PyCodeCache.load(source.replace(DRIVER, ""))
            kernel = next(value for value in vars(module).values() if hasattr(value, "compile_results"))
            kernel.precompile(warm_cache_only=True)
            for made in kernel.compile_results:
                made.kernel.n_regs = _registers(made.kernel, Path(folder) / "kernel.cubin")
            with mock.patch.object(kernel, "_make_launchers", lambda: None):
                kernel._dynamic_scale_rblock()
            return len(kernel.compile_results)


def _registers(kernel: Any, file: Path) -> int:
    code = getattr(kernel, "cubin_raw", None) or kernel.asm["cubin"]
    file.write_bytes(code)
    triton = Path(str(import_module("triton").__file__)).parent
    said = subprocess.run(
        [str(triton / "backends" / "nvidia" / "bin" / "cuobjdump"), "--dump-resource-usage", str(file)],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    found = REGISTERS.search(said)
    if found is None:
        raise ValueError("cuobjdump tells no registers")
    return int(found[1])
