"""The models are small: several threads would wait for each other longer than they work."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
