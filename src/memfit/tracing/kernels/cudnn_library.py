"""A process of its own in which a cuDNN tells its plans for convolutions, on a machine without a GPU.

    python -I cudnn_library.py FOLDER    # then a line of JSON for the card, and one for each convolution

It imports nothing of memfit: it is a guest in this process who may crash. cuDNN's heuristics need no GPU, but three
things that only a GPU tells:

    the card        in the words of CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR (since 9.8)
    its clusters    how many clusters of each size run at once: these are not in those words, though heuristics read
                    them, so they are written where the descriptor has them, if it lies in memory as is known
    cuBLAS          which says of a product whether it can run it. Without a GPU it says nothing, so it is made to say
                    yes, with a workspace that nobody could miss (`OF_CUBLAS`): what cuBLAS takes is not known here
"""

from __future__ import annotations

import ctypes as C
import glob
import json
import os
import struct
import sys
from collections.abc import Iterator, Sequence
from typing import Any

OF_CUBLAS = 1 << 40
PAGE = 1 << 12

FLOAT, DOUBLE = 0, 1
TYPES = {"float32": FLOAT, "float64": DOUBLE, "float16": 2, "bfloat16": 9}
INSTANT, FALLBACK = 0, 2
"""Heuristics that torch asks first, and those that it falls back to."""
TENSOR_CORE, DOWN_CONVERT_INPUTS, NONDETERMINISTIC = 0, 1, 4

# kinds of descriptors, attributes and types of cudnn_graph.h
CONVOLUTION, ENGINE, CONFIG, HEURISTICS, PLAN, GRAPH, TENSOR, CARD = 1, 2, 3, 4, 5, 15, 17, 38
OPERATIONS = {
    "forward": (10, 700, (704, 703, 705)),
    "weight": (11, 712, (716, 715, 717)),
    "input": (12, 706, (710, 709, 711)),
}
"""Each with its first attribute (alpha, beta, the convolution), and those of image, weight and result."""
DATA_TYPE, BOOLEAN, INT64, REAL, MODE, HEURISTIC, NOTE, DESCRIPTOR, CHAR = 1, 2, 3, 4, 7, 8, 11, 15, 24
CROSS_CORRELATION = 1


class CudnnError(Exception):
    pass


class LoadedLibrary:
    def __init__(self, folder: str) -> None:
        self.graph = C.CDLL(os.path.join(folder, "libcudnn_graph.so.9"), mode=C.RTLD_GLOBAL)
        self.graph.cudnnGetVersion.restype = C.c_size_t
        self.version = int(self.graph.cudnnGetVersion())
        self._owned: list[C.c_void_p] = []

    def check(self, status: int) -> None:
        if status:
            said = C.create_string_buffer(256)
            self.graph.cudnnGetLastErrorString(said, 256)
            raise CudnnError(f"{status}: {said.value.decode(errors='replace')}")

    def make(self, kind: int) -> C.c_void_p:
        made = C.c_void_p()
        self.check(self.graph.cudnnBackendCreateDescriptor(kind, C.byref(made)))
        self._owned.append(made)
        return made

    def put(self, to: C.c_void_p, name: int, kind: int, values: Any) -> None:
        self.check(self.graph.cudnnBackendSetAttribute(to, name, kind, C.c_int64(len(values)), values))

    def put_ints(self, to: C.c_void_p, name: int, values: Sequence[int]) -> None:
        self.put(to, name, INT64, (C.c_int64 * len(values))(*values))

    def put_enum(self, to: C.c_void_p, name: int, kind: int, value: int) -> None:
        self.put(to, name, kind, (C.c_int * 1)(value))

    def put_made(self, to: C.c_void_p, name: int, made: C.c_void_p) -> None:
        self.put(to, name, DESCRIPTOR, (C.c_void_p * 1)(made.value))

    def finish(self, made: C.c_void_p) -> C.c_void_p:
        self.check(self.graph.cudnnBackendFinalize(made))
        return made

    def read(self, of: C.c_void_p, name: int, kind: int, into: Any) -> int:
        """How many there are."""
        count = C.c_int64()
        room = C.c_int64(0 if into is None else len(into))
        self.check(self.graph.cudnnBackendGetAttribute(of, name, kind, room, C.byref(count), into))
        return count.value

    def forget(self, keep: int) -> None:
        for made in reversed(self._owned[keep:]):
            self.graph.cudnnBackendDestroyDescriptor(made)
        del self._owned[keep:]

    # -- the card ------------------------------------------------------------------------------------------------

    def card(self, facts: dict[str, Any], clusters: Sequence[int]) -> C.c_void_p:
        words = json.dumps(facts).encode()
        made = self.make(CARD)
        self.put(made, 2702, CHAR, C.create_string_buffer(words, len(words)))
        self.finish(made)
        if clusters:
            self._put_clusters(made, facts, clusters)
        return made

    def _put_clusters(self, card: C.c_void_p, facts: dict[str, Any], clusters: Sequence[int]) -> None:
        known = struct.pack("<3i", facts["deviceVer"], facts["driverVer"], clusters[0])
        unknown = bytes(4 * (len(clusters) - 1))
        lies = C.string_at(card.value or 0, 512).find(known + unknown + facts["deviceName"].encode())
        if lies < 0:
            raise CudnnError(f"the card of cuDNN {self.version} does not lie in memory as that of 9.19 does")
        C.memmove((card.value or 0) + lies + 8, struct.pack(f"<{len(clusters)}i", *clusters), 4 * len(clusters))

    # -- convolutions ----------------------------------------------------------------------------------------------

    def plans(self, card: C.c_void_p, of: dict[str, Any]) -> Iterator[int]:
        """Bytes of workspace of those that torch would try, in its order (native/cudnn/Conv_v8.cpp)."""
        graph = self._graph(of)
        for mode in (INSTANT, FALLBACK):
            asked = self.make(HEURISTICS)
            self.put_made(asked, 201, graph)
            self.put_enum(asked, 200, HEURISTIC, mode)
            self.put_made(asked, 204, card)
            self.finish(asked)
            made = [self.make(CONFIG) for _ in range(self.read(asked, 202, DESCRIPTOR, None))]
            if not made:
                continue
            found = self.read(asked, 202, DESCRIPTOR, (C.c_void_p * len(made))(*[each.value for each in made]))
            for config in made[:found]:
                if self._is_wanted(config, of) and (taken := self._workspace(config, card)) is not None:
                    yield taken

    def _is_wanted(self, config: C.c_void_p, of: dict[str, Any]) -> bool:
        engine, notes = self.make(ENGINE), (C.c_int * 32)()
        self.read(config, 300, DESCRIPTOR, (C.c_void_p * 1)(engine.value))
        said = set(notes[: self.read(engine, 1303, NOTE, notes)])
        refused = {DOWN_CONVERT_INPUTS}
        if of["deterministic"]:
            refused.add(NONDETERMINISTIC)
        if of["dtype"] == "float32" and not of["tf32"]:
            refused.add(TENSOR_CORE)
        return not said & refused

    def _workspace(self, config: C.c_void_p, card: C.c_void_p) -> int | None:
        plan, taken = self.make(PLAN), (C.c_int64 * 1)()
        self.put_made(plan, 401, config)
        self.put_made(plan, 407, card)
        try:
            self.finish(plan)
        except CudnnError:
            return None  # torch goes on to the next, too
        self.read(plan, 402, INT64, taken)
        return int(taken[0])

    def _graph(self, of: dict[str, Any]) -> C.c_void_p:
        kind, first, places = OPERATIONS[of["kind"]]
        operation = self.make(kind)
        for place, name, alignment in zip(places, ("image", "weight", "result"), of["alignments"], strict=True):
            self.put_made(operation, place, self._tensor(of[name], name, alignment, of))
        self.put_made(operation, first + 2, self._convolution(of))
        for place, factor in ((first, 1.0), (first + 1, 0.0)):
            self.put(operation, place, REAL, (C.c_float * 1)(factor))
        graph = self.make(GRAPH)
        self.put_made(graph, 801, self.finish(operation))
        return self.finish(graph)

    def _convolution(self, of: dict[str, Any]) -> C.c_void_p:
        made = self.make(CONVOLUTION)
        self.put_enum(made, 100, DATA_TYPE, DOUBLE if of["dtype"] == "float64" else FLOAT)
        self.put_enum(made, 101, MODE, CROSS_CORRELATION)
        self.put_ints(made, 106, [len(of["padding"])])
        for place, name in ((102, "dilation"), (103, "stride"), (104, "padding"), (105, "padding")):
            self.put_ints(made, place, of[name])
        return self.finish(made)

    def _tensor(self, shape: list[int], name: str, alignment: int, of: dict[str, Any]) -> C.c_void_p:
        made = self.make(TENSOR)
        self.put_enum(made, 901, DATA_TYPE, TYPES[of["dtype"]])
        self.put_ints(made, 902, shape)
        self.put_ints(made, 903, strides_of(shape, of["channels_last"]))
        self.put_ints(made, 906, [ord({"image": "x", "weight": "w", "result": "y"}[name])])
        self.put_ints(made, 900, [alignment])
        self.put(made, 907, BOOLEAN, (C.c_bool * 1)(False))
        return self.finish(made)


def strides_of(shape: Sequence[int], channels_last: bool) -> list[int]:
    places = list(range(len(shape) - 1, 1, -1))
    order = [1, *places, 0] if channels_last else [*places, 1, 0]
    strides, next_one = [0] * len(shape), 1
    for place in order:
        strides[place], next_one = next_one, next_one * shape[place]
    return strides


# -- cuBLAS that says yes ------------------------------------------------------------------------------------------


def _create(handle: Any) -> int:
    handle[0] = 1
    return 0


def _find(*arguments: Any) -> int:
    result, count = arguments[-2:]
    C.memset(result, 0, 96)  # cublasLtMatmulHeuristicResult_t: 64 bytes of algorithm, then the workspace
    C.cast(result + 64, C.POINTER(C.c_uint64))[0] = OF_CUBLAS
    count[0] = 1
    return 0


CREATES = C.CFUNCTYPE(C.c_int, C.POINTER(C.c_void_p))(_create)
FINDS = C.CFUNCTYPE(C.c_int, *[C.c_void_p] * 7, C.c_int, C.c_void_p, C.POINTER(C.c_int))(_find)


def make_cublas_agree(folder: str) -> None:
    """As wheels lie, or else wherever the system has it: cuDNN then finds this one by its name."""
    beside = [os.path.join(folder, "..", "..", name, "lib", "libcublasLt.so.*") for name in ("cu13", "cublas")]
    found = [path for pattern in (*beside, os.path.join(folder, "libcublasLt.so.*")) for path in glob.glob(pattern)]
    for name in (*sorted(found, key=len), "libcublasLt.so.13", "libcublasLt.so.12"):
        try:
            cublas = C.CDLL(os.path.realpath(name) if os.sep in name else name, mode=C.RTLD_GLOBAL)
        except OSError:
            continue
        _replace(cublas.cublasLtCreate, CREATES)
        _replace(cublas.cublasLtMatmulAlgoGetHeuristic, FINDS)
        return
    raise CudnnError("no libcublasLt beside it")


def _replace(function: Any, by: Any) -> None:
    """x86-64: load an address, go there."""
    place = C.cast(function, C.c_void_p).value or 0
    code = b"\x48\xb8" + struct.pack("<Q", C.cast(by, C.c_void_p).value or 0) + b"\xff\xe0"
    page = place & ~(PAGE - 1)
    if C.CDLL(None).mprotect(C.c_void_p(page), C.c_size_t(2 * PAGE), 7):
        raise CudnnError("cuBLAS cannot be changed")
    C.memmove(place, code, len(code))


def main(folder: str) -> None:
    library = LoadedLibrary(folder)
    make_cublas_agree(folder)
    words = json.loads(sys.stdin.readline())
    card = library.card(words["card"], words["clusters"])
    _say({"version": library.version})
    for line in sys.stdin:
        of = json.loads(line)
        try:
            plans = library.plans(card, of)
            answer: Any = list(plans) if of["every"] else [next(plans)]
        except (CudnnError, StopIteration):
            answer = []
        library.forget(keep=1)
        _say(answer)


def _say(answer: Any) -> None:
    sys.stdout.write(f"{json.dumps(answer)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
