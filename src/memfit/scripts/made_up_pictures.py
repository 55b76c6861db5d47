"""`--synthetic-data`: data sets of torchvision and timm that are not on this machine, black pictures in their sizes.

They are never downloaded; one that lies where the program looks is read.
"""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

from memfit.scripts.made_up_rows import CLASSES, PICTURE, PICTURES

IN_A_FOLDER = 5000


def patches_of_pictures(tracer: Any) -> list[Any]:
    """By which classes of `torchvision.datasets` are filled where they find nothing; none before it is imported."""
    sets: Any = sys.modules.get("torchvision.datasets")
    if not hasattr(sets, "ImageFolder"):
        return []
    made: list[Any] = []
    for name, fill in FILLED.items():
        kind = getattr(sets, name)
        made.append(mock.patch.object(kind, "__init__", _found_or_made(kind.__init__, fill, tracer)))
        named_so = [each for each in (kind, *kind.__subclasses__()) if "download" in vars(each)]
        made += [mock.patch.object(each, "download", _nothing) for each in named_so]
    return made


def _found_or_made(begin: Callable[..., None], fill: Callable[[Any], str], tracer: Any) -> Callable[..., None]:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            begin(self, *args, **kwargs)
        except (RuntimeError, OSError):
            if fill is _of_a_folder and os.path.isdir(self.root):
                raise
            tracer.assume(f"{type(self).__name__} in {self.root}: made-up pictures, {fill(self)}")

    return __init__


def _nothing(*_: Any) -> None:
    pass


def _of_cifar(made: Any) -> str:
    import numpy as np

    count, classes = (50_000 if made.train else 10_000), 100 if "100" in type(made).__name__ else 10
    made.data = np.zeros((count, 32, 32, 3), np.uint8)
    made.targets = [number % classes for number in range(count)]
    return f"32x32, {_named(made, classes)}"


def _of_mnist(made: Any) -> str:
    import torch

    count = 60_000 if made.train else 10_000
    made.data = torch.zeros((count, 28, 28), dtype=torch.uint8)
    made.targets = torch.arange(count) % 10
    return "28x28, 10 classes"


def _of_svhn(made: Any) -> str:
    import numpy as np

    count = {"train": 73_257, "test": 26_032}.get(made.split, 531_131)
    made.data, made.labels = np.zeros((count, 3, 32, 32), np.uint8), np.arange(count) % 10
    return "32x32, 10 classes"


def _of_stl10(made: Any) -> str:
    import numpy as np

    parts = {"train": 5_000, "test": 8_000, "unlabeled": 100_000}
    counts = [parts[part] for part in made.split.split("+")]
    made.data = np.zeros((sum(counts), 3, 96, 96), np.uint8)
    unlabeled = 0 if made.split == "unlabeled" else counts[0]
    made.labels = np.where(np.arange(sum(counts)) < unlabeled, np.arange(sum(counts)) % 10, -1)
    return "96x96, 10 classes"


def _of_a_folder(made: Any) -> str:
    picture, classes = _picture(), _classes_of(made.root)
    made.samples = [(f"{made.root}/{number}.jpg", number % classes) for number in range(IN_A_FOLDER)]
    made.targets = [target for _, target in made.samples]
    made.loader, made.extensions = (lambda _: picture), None
    return f"{picture.width}x{picture.height}, {_named(made, classes)}"


def _picture() -> Any:
    from PIL import Image

    return Image.new(*PICTURES[PICTURE])


def _classes_of(root: object) -> int:
    return next(count for words, count in CLASSES if re.search(words, str(root), re.IGNORECASE))


def _named(made: Any, classes: int) -> str:
    made.classes = [f"class {number}" for number in range(classes)]
    made.class_to_idx = {name: number for number, name in enumerate(made.classes)}
    return f"{classes:,} classes"


def patches_of_timm(tracer: Any) -> list[Any]:
    """By which its own data set of a folder that is not here has pictures."""
    sets: Any = sys.modules.get("timm.data.dataset")
    if not hasattr(sets, "ImageDataset"):
        return []
    begin = sets.ImageDataset.__init__

    def __init__(self: Any, root: Any, reader: Any = None, *args: Any, **kwargs: Any) -> None:
        if not reader and not os.path.exists(root):
            reader = _MadeUpReader(str(root))
            tracer.assume(f"ImageDataset in {root}: made-up pictures, {reader.told}")
        begin(self, root, reader, *args, **kwargs)

    return [mock.patch.object(sets.ImageDataset, "__init__", __init__)]


class _MadeUpReader:
    """As timm's data set asks it for files and their classes."""

    def __init__(self, root: str) -> None:
        kept, picture = io.BytesIO(), _picture()
        picture.save(kept, "JPEG")
        self._file, self._root, self._classes = kept.getvalue(), root, _classes_of(root)
        self.class_to_idx = {f"class {number}": number for number in range(self._classes)}
        self.told = f"{picture.width}x{picture.height}, {self._classes:,} classes"

    def __len__(self) -> int:
        return IN_A_FOLDER

    def __getitem__(self, number: int) -> tuple[io.BytesIO, int]:
        return io.BytesIO(self._file), number % self._classes

    def filename(self, number: int, *_: Any, **__: Any) -> str:
        return f"{self._root}/{number}.jpg"

    def filenames(self, *_: Any, **__: Any) -> list[str]:
        return [self.filename(number) for number in range(len(self))]


FILLED = {
    "CIFAR10": _of_cifar, "MNIST": _of_mnist, "SVHN": _of_svhn, "STL10": _of_stl10, "DatasetFolder": _of_a_folder,
}  # fmt: skip
