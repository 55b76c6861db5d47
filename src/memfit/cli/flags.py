"""Flags that many commands have, in the same words."""

from __future__ import annotations

from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout instead of the report.")]
