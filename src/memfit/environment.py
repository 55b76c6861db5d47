"""Variables of the environment that set torch's allocator, and the settings in them that torch does not survive.

torch ends the process at `expandable_segments=True` (torch 2.11 for CUDA) without a word: told before it is imported.
"""

from __future__ import annotations

from collections.abc import Mapping

from memfit.errors import UsageError

CUDA_VARIABLE, NEW_VARIABLE = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"
VARIABLES = (CUDA_VARIABLE, "PYTORCH_HIP_ALLOC_CONF", NEW_VARIABLE)
"""In the order in which torch looks for them: the first that is there wins."""


def exported(environment: Mapping[str, str]) -> dict[str, str]:
    """Each variable that is set; torch reads the first."""
    return {name: environment[name] for name in VARIABLES if environment.get(name)}


def refuse_what_torch_dies_of(environment: Mapping[str, str]) -> None:
    for name, text in exported(environment).items():
        if any("=" in setting and ":" not in setting for setting in text.split(",")):
            raise UsageError(
                f"{name}={text}: a setting is written key:value", hint=f"export {name}={text.replace('=', ':')}"
            )
