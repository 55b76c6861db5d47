"""How the page is served: where, to whom, and which folder it may read."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from memfit.serving.security import new_token

PORT = 8642


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    dir: Path = Path()
    """Runs, snapshots and models are read from below this folder, and nothing else is."""
    host: str = "127.0.0.1"
    port: int = PORT
    token: str = field(default_factory=new_token)
