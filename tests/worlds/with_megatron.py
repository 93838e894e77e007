"""Imports megatron-core as its tests' scripts do, in a process that forks their workers."""

from __future__ import annotations

import warnings

import torch

from unicron_lightning.megatron import shim

warnings.simplefilter("ignore")  # hide megatron-core's warnings about packages that are not installed
if not torch.cuda.is_available():
    shim.install()

import megatron.core.distributed  # noqa: E402
import megatron.core.optimizer  # noqa: E402, F401

import unicron_lightning.megatron.toy  # noqa: E402
import unicron_lightning.strategies.megatron.strategy  # noqa: E402, F401
