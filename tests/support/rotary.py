"""How the transformers that is here computes its tables of angles."""

from __future__ import annotations

import inspect

from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

ROTARY_TABLES_ARE_A_PRODUCT = "@ position_ids" in inspect.getsource(LlamaRotaryEmbedding.forward)
"""Of matrices, by cuBLAS, in transformers 5.17 and before; later ones multiply entry by entry."""
