"""The five documents that memfit answers, by their titles.

docs/guides.md has what each asks for and the command that does it, beside what is predicted of their claims
(`make guides`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Document:
    title: str
    name: str
    """What memfit's own texts call it."""
    about: str


DEBUGGING = Document(
    "Memory Debugging Guide",
    "memory debugging guide",
    "An out-of-memory error of the public Wanda code on Llama-3.2-1B, 64 GiB at once, and a memory log.",
)
REQUIREMENTS = Document(
    "Memory Requirements Estimation for Wanda Pruning",
    "requirements guide",
    "What Wanda takes for Llamas of 1B to 70B, and which card is needed: tables, a formula, worked examples.",
)
PROFILING = Document(
    "Memory Profiling Module",
    "profiling guide",
    "Snapshots of a forward pass and a training step of the CS336 models, and the questions (a) to (e) on them.",
)
LORA_7B = Document(
    "Memory Optimization Guide - Baseline 7B Training",
    "7B guide",
    "A LoRA run of Qwen2.5-7B, rank 128, that runs out of 24 GB, and six changes that are to make it fit.",
)
GSA_512M = Document(
    "Memory Optimization Guide",
    "GSA guide",
    "Pre-training GSA-512M on four cards of 44 GB with 256 rows a step, and a ladder of larger micro-batches.",
)
DOCUMENTS = (DEBUGGING, REQUIREMENTS, PROFILING, LORA_7B, GSA_512M)
