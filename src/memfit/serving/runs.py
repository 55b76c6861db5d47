"""The view Runs: folders of recorded runs, live ones too, one by one and side by side."""

from __future__ import annotations

from fastapi import APIRouter

router = APIRouter(prefix="/api/runs")
