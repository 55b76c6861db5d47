"""The models that come with memfit as code, made known to transformers: GSA, and that of the CS336 course.

GSA is a model of transformers' own kind in all respects. The course's Transformer is a plain module, of which
transformers keeps the settings.
"""

from __future__ import annotations

from functools import cache

from torch import nn

from memfit.models.presets import BASICS, GSA_TYPE

OWN_TYPES = (GSA_TYPE, BASICS)
"""Their attention is their own: transformers has no other for them."""


@cache
def make_known() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    from memfit.models.basics import BasicsTransformer
    from memfit.models.basics_settings import BasicsSettings
    from memfit.models.gsa import GsaConfig, GsaForCausalLM

    AutoConfig.register(GSA_TYPE, GsaConfig)
    AutoModelForCausalLM.register(GsaConfig, GsaForCausalLM)
    AutoConfig.register(BASICS, BasicsSettings)
    AutoModelForCausalLM.register(BasicsSettings, BasicsTransformer)


def block_list(model: nn.Module) -> tuple[str, nn.ModuleList] | None:
    """The longest list of modules that is in no other list, with its path."""
    lists = {name: m for name, m in model.named_modules() if isinstance(m, nn.ModuleList)}
    outer = [(n, m) for n, m in lists.items() if len(m) > 1 and not any(n.startswith(f"{o}.") for o in lists)]
    return max(outer, key=lambda found: len(found[1])) if outer else None
