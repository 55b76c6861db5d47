"""`memfit models`: the shipped models."""

from __future__ import annotations

from memfit.cli import output
from memfit.cli.options import Json

SCHEMA = "memfit.models/1"


def models(
    json: Json = False,
) -> None:
    """List the models that --model knows by name.

    They are hyper-parameters only: nothing is downloaded, for memory does not depend on the values of weights.
    """
    from memfit.models.presets import presets

    document = {
        "schema": SCHEMA,
        "models": [
            {
                "name": preset.name,
                "type": preset.model_type,
                "parameters": preset.parameters,
                "hub_ids": [alias for alias in preset.aliases if "/" in alias],
                "aliases": [alias for alias in preset.aliases if "/" not in alias],
                "source": preset.source,
                "note": preset.note,
            }
            for preset in presets()
        ],
    }
    if json:
        output.print_json(document)
    else:
        from memfit.render.small import show_models

        output.show(show_models, document)
