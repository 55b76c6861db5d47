"""The view of that name: what it asks of memfit."""

from __future__ import annotations

from fastapi import APIRouter

router = APIRouter()
