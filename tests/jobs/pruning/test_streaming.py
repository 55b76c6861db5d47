"""Bytes in and out through small buffers, and the threads around them."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from memfit.errors import InputError
from memfit.jobs.host import HostMemory, as_bytes
from memfit.jobs.pruning.decoder import Layout, Slot, StoredPiece
from memfit.jobs.pruning.streaming import BlockReader, BlockWriter, Downloads, Load, Parts, Uploads, bring
from memfit.models.checkpoint import WeightStore

CPU = torch.device("cpu")
CHUNK = 64


@pytest.mark.parametrize("size", [1, CHUNK, CHUNK + 1, 5 * CHUNK - 3])
def test_what_goes_in_by_chunks_comes_out_the_same(size: int) -> None:
    host = HostMemory(CPU)
    value = torch.randint(0, 255, (size,), dtype=torch.uint8)
    there = torch.zeros(size, dtype=torch.uint8)
    uploads, downloads = Uploads(CPU, host, CHUNK), Downloads(CPU, host, CHUNK)

    def read(out: memoryview, start: int) -> None:
        out[:] = as_bytes(value)[start : start + len(out)]

    uploads.send(there, read)
    assert torch.equal(there, value)
    back = bytearray(size)
    for start, part in downloads.fetch(there):
        back[start : start + len(part)] = part
    assert bytes(back) == bytes(as_bytes(value))
    uploads.release()
    downloads.release()
    assert (host.held_bytes, host.peak_bytes) == (0, 4 * CHUNK)


@pytest.mark.parametrize(("stored", "model"), [
    (torch.float32, torch.bfloat16), (torch.float32, torch.float16), (torch.bfloat16, torch.float32),
    (torch.float16, torch.bfloat16),
])  # fmt: skip
def test_a_tensor_of_another_type_than_the_models_comes_in_whole_through_small_chunks(
    tmp_path: Path, stored: torch.dtype, model: torch.dtype
) -> None:
    from safetensors.torch import save_file

    value = torch.randn(7, 33).to(stored)
    save_file({"before": torch.ones(3), "w": value}, tmp_path / "model.safetensors")
    weights = WeightStore.open(tmp_path)
    slot = Slot("w", (7, 33), model, 0)
    layout = Layout((slot,), (StoredPiece(weights.stored["w"], slot, 0),), slot.nbytes)
    flat = torch.zeros(slot.nbytes, dtype=torch.uint8)
    bring(weights, layout, flat, Uploads(CPU, HostMemory(CPU), CHUNK))
    weights.close()
    assert flat.numel() > 3 * CHUNK
    assert torch.equal(flat.view(model).view(7, 33), value.to(model))


def test_blocks_are_fetched_in_order_as_places_become_free() -> None:
    fetched: list[tuple[int, int]] = []
    loads = [Load(index) for index in range(4)]
    reader = BlockReader(loads, 2, lambda load, place: fetched.append((load.block, place)))
    places = []
    for load in loads:
        place, _ = reader.wait(load)
        places.append(place)
        reader.leave(None)
    reader.close()
    assert places == [0, 1, 0, 1]
    assert fetched == [(0, 0), (1, 1), (2, 0), (3, 1)]


def test_a_place_is_not_filled_before_what_it_held_is_written() -> None:
    order: list[str] = []
    written: Future[None] = Future()
    reader = BlockReader([Load(0), Load(1)], 1, lambda load, place: order.append(f"fetch {load.block}"))
    reader.wait(Load(0))
    reader.leave(written)
    order.append("written")
    written.set_result(None)
    reader.wait(Load(1))
    reader.close()
    assert order == ["fetch 0", "written", "fetch 1"]


def test_what_goes_wrong_while_writing_is_raised_where_the_next_block_is_waited_for() -> None:
    class Full:
        def write(self, block: int, parts: Parts, facts: Mapping[str, Any]) -> None:
            raise InputError("the disk is full")

    downloads = Downloads(CPU, HostMemory(CPU))
    writer = BlockWriter(Full(), downloads)
    reader = BlockReader([Load(0), Load(1)], 1, lambda load, place: None)
    reader.wait(Load(0))
    reader.leave(writer.put(0, torch.zeros(8, dtype=torch.uint8), None, dict))
    with pytest.raises(InputError, match="the disk is full"):
        reader.wait(Load(1))
    with pytest.raises(InputError, match="the disk is full"):
        writer.wait()
    reader.close()
    writer.close()
