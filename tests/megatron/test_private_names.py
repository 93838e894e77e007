"""The private names of megatron-core on which this package depends exist in the installed version.

A new version of megatron-core needs an entry in `MEGATRON` with the names of that version, added after a review of each
name. Names with an underscore, including those of torch and Lightning, are also searched in the source, so that the
lists are complete.
"""

from __future__ import annotations

import ast
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from worlds.client import Worlds

ROOT = Path(__file__).parents[2]
SOURCES = [
    *(path for name in ("megatron", "replica") for path in (ROOT / "unicron_lightning" / name).glob("*.py")),
    *(ROOT / "strategies" / "megatron").glob("*.py"),
]

_V0_16: Final = {
    "megatron.core.optimizer": ["_get_param_groups"],  # sharded
    "megatron.core.tensor_parallel.random": ["_get_cuda_rng_state", "_set_cuda_rng_state"],  # shim
    "megatron.core.dist_checkpointing.core": ["CONFIG_FNAME", "CheckpointingConfig"],  # checkpoint
    "megatron.core.dist_checkpointing.dict_utils": ["dict_list_map_outplace", "merge", "nested_values"],
    "megatron.core.dist_checkpointing.mapping": ["apply_factory_merges", "is_main_replica"],
    "megatron.core.dist_checkpointing.state_dict_utils": ["load_preprocess", "save_preprocess"],
    "megatron.core.dist_checkpointing.utils": ["extract_sharded_base"],
    "megatron.core.dist_checkpointing.strategies.common": ["COMMON_STATE_FNAME"],
    "DistributedDataParallel": [  # gradients, sharded
        *("bucket_groups", "buffers", "ddp_config", "disable_forward_pre_hook", "expert_parallel_bucket_groups"),
        *("expert_parallel_buffers", "grad_accs", "module", "no_sync", "param_to_bucket_group", "start_param_sync"),
        *("use_forward_hook", "zero_grad_buffer"),
    ],
    # sharded: initialised again in place
    "DistributedDataParallel()": ["config", "ddp_config", "module", "disable_bucketing"],
    "bucket group": [  # gradients, sharded
        *("buckets", "cached_grad_buffer_shard_list", "cached_param_buffer_shard_list", "grad_reduce_handle"),
        *("is_first_batch", "is_last_microbatch", "params", "per_param_grad_ready_counts", "start_grad_sync"),
    ],
    "bucket": ["grad_data", "gradient_scaling_factor", "param_data"],
    "buffer": ["buckets", "grad_data", "param_data"],
    "ChainedOptimizer": [  # model
        *("chained_optimizers", "get_grad_norm", "prepare_grads", "reload_model_params", "step_with_ready_grads"),
    ],
    "DistributedOptimizer": [  # sharded, checkpoint
        *("_copy_main_params_to_model_params", "_get_main_param_and_optimizer_states", "_get_model_param_range_map"),
        *("buffers", "config", "data_parallel_group_gloo"),
        *("data_parallel_group_idx", "distributed_optimizer_instance_id", "get_parameters", "grad_scaler"),
        *("grad_stats_parallel_group", "init_state_fn", "is_stub_optimizer", "model_param_gbuf_map"),
        *("model_param_group_index_map", "opt_group_ranges", "optimizer", "per_model_bucket_groups"),
        *("per_model_buffers", "shard_float16_groups", "shard_fp32_from_float16_groups", "shard_fp32_groups"),
        "tp_group",
    ],
    "DistributedOptimizer()": [  # sharded: initialised again in place
        *("optimizer", "config", "grad_scaler", "init_state_fn", "model_chunks", "per_model_buffers"),
        *("data_parallel_group", "data_parallel_group_gloo", "data_parallel_group_idx"),
        "distributed_optimizer_instance_id",
    ],
}
MEGATRON: Final = {"0.16": _V0_16}
"""By minor version, then by the owner of the names; the comments name the modules that use them."""

OTHERS: Final = {
    "torch": {
        *(
            "_create_internal",
            "_get_backend",
            "_plugins",
            "_register_backend",
        ),
        *("_world", "torch._C"),
    },
    "lightning": {
        *("_broadcast_sigterm_tensor", "_call_lightning_module_hook"),
        *("_configure_schedulers_automatic_opt", "_signal_connector"),
        "_sigterm_notifier_fn",
    },
}
"""Exercised by every fault test of this folder."""


def installed() -> str:
    pytest.importorskip("megatron.core.package_info")
    return ".".join(version("megatron-core").split(".")[:2])


def test_the_installed_version_was_looked_at() -> None:
    found = installed()
    assert found in MEGATRON, f"megatron-core {found}: look what became of the names in {__file__}, and add an entry"


@pytest.mark.faults
def test_megatron_has_the_names_that_we_lean_on(worlds: Worlds, tmp_path: Path) -> None:
    found = installed()
    (missing,) = worlds.run("inside:missing", 1, tmp_path, names=MEGATRON[found])
    assert not missing, f"megatron-core {version('megatron-core')} lacks {missing}"


def test_the_lists_have_all_private_names() -> None:
    listed = {name for names in _V0_16.values() for name in names if name.startswith("_")}.union(*OTHERS.values())
    used: dict[str, set[str]] = {}
    for path in SOURCES:
        for name in private_names(ast.parse(path.read_text())):
            used.setdefault(name, set()).add(path.name)
    assert len(SOURCES) > 10
    assert {name: files for name, files in used.items() if name not in listed} == {}, "not listed"
    assert listed - used.keys() == set(), "listed, and not used any more"


def private_names(tree: ast.AST) -> Iterator[str]:
    """Names with an underscore of foreign objects: imported, accessed, or replaced by name."""
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module), names=names):
                yield from (alias.name for alias in names if alias.name.startswith("_"))
                if "._" in module:
                    yield ".".join(module.split(".")[:2])
            case ast.Attribute(value=ast.Name(id="self" | "cls" | "os") | ast.Call(func=ast.Name(id="super"))):
                continue
            case ast.Attribute(attr=name) if name.startswith("_") and not name.startswith("__"):
                yield name
            case ast.Call(func=ast.Name(id="_replace"), args=[_, ast.Constant(value=str(name)), *_]) if name[0] == "_":
                yield name
