"""Packages that must not be importable when Lightning is imported: they are in the folder `$ZOO_PACKAGES`."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from pathlib import Path
from typing import Final

import torch

DECLARED: Final = torch.library.Library("torchvision", "FRAGMENT")
FOLDER: Final = list(filter(None, [os.environ.get("ZOO_PACKAGES")]))
"""The folder, if there is one, as an extension of `sys.path`."""


@functools.cache
def use_packages() -> None:
    """Make the packages of the folder importable.

    The package index has torchvision for torch with CUDA only. If its compiled operators do not load, two of them are
    declared, which its own import, and the imports of timm and transformers need; the models here do not use them.
    """
    sys.path += FOLDER
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return
    try:
        torch.ops.load_library(str(Path(spec.origin).with_name("_C.so")))
    except OSError:
        for name in ("nms", "qnms"):
            DECLARED.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
