"""`memfit gpus` and `memfit models`: the cards and the models that are known by name."""

from __future__ import annotations

from memfit.cli import output
from memfit.cli.options import Json

GPUS_SCHEMA, MODELS_SCHEMA = "memfit.gpus/1", "memfit.models/1"


def gpus(
    json: Json = False,
) -> None:
    """List the cards that --gpu knows by name, and slices of them.

    Memory is what a card gives to a program, which is less than its label; context is what CUDA itself takes of that
    after a training step. Where that was not measured it is a range, of which verdicts count the upper end.
    """
    from dataclasses import asdict

    from memfit.gpus import list_gpus, list_slices

    document = {
        "schema": GPUS_SCHEMA,
        "gpus": [
            {
                "name": card.name, "capacity_bytes": card.capacity_bytes, "context_bytes": card.context_bytes,
                "context": asdict(card.context_after(training=True, flash=True)),
                "compute_capability": ".".join(map(str, card.arch)), "sm_count": card.sm_count,
                "bandwidth_bytes_per_second": card.bandwidth, "flops_16bit": card.flops_16bit,
                "flops_fp32": card.flops_fp32, "link_bytes_per_second": card.link_bandwidth,
                "notes": list(card.notes), "source": card.source,
            }
            for card in (*list_gpus(), *list_slices())
        ],
    }  # fmt: skip
    if json:
        output.print_json(document)
    else:
        from memfit.render.small import show_gpus

        output.show(show_gpus, document)


def models(
    json: Json = False,
) -> None:
    """List the models that --model knows by name.

    They are hyper-parameters only: nothing is downloaded, for memory does not depend on the values of weights. Those
    that are published quantised too go by the hub ids of such checkpoints (--json has them).
    """
    from memfit.models.presets import encoders, presets, variants

    document = {
        "schema": MODELS_SCHEMA,
        "models": [
            {
                "name": preset.name, "type": preset.model_type, "parameters": preset.parameters,
                "hub_ids": [alias for alias in preset.aliases if "/" in alias],
                "aliases": [alias for alias in preset.aliases if "/" not in alias],
                "quantised": [
                    {"hub_id": name, "storage": each.storage, "quantization_config": each.config["quantization_config"]}
                    for name, each in variants().get(preset.name, {}).items()
                ],
                "source": preset.source, "note": preset.note,
            }
            for preset in (*presets(), *encoders())
        ],
    }  # fmt: skip
    if json:
        output.print_json(document)
    else:
        from memfit.render.small import show_models

        output.show(show_models, document)
