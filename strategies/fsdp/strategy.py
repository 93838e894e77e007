"""The Lightning strategy ``unicron_fsdp``: models sharded with FSDP2, trained straight through failures.

A replica of ``shard_size`` workers holds one copy of the model, sharded by `torch.distributed.fsdp.fully_shard`, and is
the unit of failure. Replicas exchange gradients as the workers of `UnicronStrategy` do (docs/sharded.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning.fabric.utilities.apply_func import apply_to_collection
from torch.distributed.tensor import DTensor
from typing_extensions import override

from unicron_lightning.errors import ConfigError
from unicron_lightning.fsdp.mesh import reshard
from unicron_lightning.replica.fabric import ReplicaFabric
from unicron_lightning.strategies.fault_tolerant import FaultTolerantStrategy
from unicron_lightning.strategies.fsdp.parallel import FsdpParallel, Sharding
from unicron_lightning.worker.comparison import Divergence, OnDivergence


class UnicronFSDPStrategy(FaultTolerantStrategy):
    """Sharded data parallelism through failures.

    Args:
        shard_size: lanes of a replica (S), each of T workers that compute a micro-batch together; S x T is a divisor of
            devices x num_nodes; default: the lanes of a node.
        tensor_parallel_size: workers of a lane (T), for tensor parallelism in ``configure_model`` on
            ``self.device_mesh["tensor_parallel"]``.
        blocks: names of the classes whose modules are sharded one by one, such as ``("Block",)``, or the least number
            of a block's parameters, if the module's ``configure_model`` does not shard; default: the elements of every
            `torch.nn.ModuleList`.
        activation_checkpointing: names of the classes whose modules compute their activations again in the backward;
            likewise.
        num_micro_batches: M of a global batch, instead of accumulate_grad_batches x devices x num_nodes / T.
        reshard_after_forward: free the gathered parameters between forward and backward, as in FSDP2; without effect on
            a ``configure_model`` that shards.
        save_distributed_checkpoint: write checkpoints as folders in the format of `torch.distributed.checkpoint`, to
            which each worker of a replica writes its shard, instead of a file with whole tensors. Both are resumed.
        rebalance: a replica that is slower than the others gets fewer of a step's rows of micro-batches.
        cpu_offload: keep parameters, gradients and optimizer state in host memory, and update them there; refused with
            ``accelerator="cpu"``, and without effect on a ``configure_model`` that shards.
        reproducible: the same bits for any failures, joins and stragglers, and any number of replicas of the same size;
            see `UnicronStrategy`.
        compare: workers are compared when the task begins and at each join; see `UnicronStrategy`.
        witness_every: k: in every k-th step each replica repeats a row of another one, and their gradients' bits are
            compared before the reduction; see `UnicronStrategy`.
        digest_every, on_divergence: comparison of the replicas' parameters, shard by shard; see `UnicronStrategy`.

    Raises:
        ConfigError: for settings that can't be supported exactly; see `fsdp_checks`.
    """

    strategy_name = "unicron_fsdp"

    def __init__(
        self,
        *,
        shard_size: int | None = None,
        tensor_parallel_size: int = 1,
        blocks: Sequence[str] | int = (),
        activation_checkpointing: Sequence[str] = (),
        num_micro_batches: int | None = None,
        reshard_after_forward: bool = True,
        save_distributed_checkpoint: bool = False,
        cpu_offload: bool = False,
        rebalance: bool = False,
        digest_every: int = 100,
        on_divergence: OnDivergence = "heal",
        reproducible: bool = False,
        compare: bool = True,
        witness_every: int | None = None,
    ) -> None:
        super().__init__(
            num_micro_batches=num_micro_batches,
            compare=compare,
            reproducible=reproducible,
            witness_every=witness_every,
        )
        if shard_size is not None and shard_size < 1:
            raise ConfigError(f"shard_size={shard_size!r}: expected 1 or more, or None for the devices of a node")
        if tensor_parallel_size < 1:
            raise ConfigError(f"tensor_parallel_size={tensor_parallel_size!r}: expected 1 or more")
        for name, value in (
            ("reshard_after_forward", reshard_after_forward),
            ("save_distributed_checkpoint", save_distributed_checkpoint),
            ("cpu_offload", cpu_offload),
            ("rebalance", rebalance),
        ):
            if not isinstance(value, bool):
                raise ConfigError(f"{name}={value!r}: expected True or False")
        for name, classes in (("blocks", blocks), ("activation_checkpointing", activation_checkpointing)):
            if isinstance(classes, str):
                raise ConfigError(f"{name}={classes!r}: expected names of classes, such as ({classes!r},)")
        if isinstance(blocks, int) and blocks < 1:
            raise ConfigError(f"blocks={blocks!r}: expected names of classes, or a number of parameters of 1 or more")
        sharding = Sharding(
            blocks=blocks if isinstance(blocks, int) else tuple(blocks),
            activation_checkpointing=tuple(activation_checkpointing),
            reshard_after_forward=reshard_after_forward,
            cpu_offload=cpu_offload,
        )
        self._sharded = FsdpParallel(
            self,
            shard_size,
            tensor_parallel_size,
            sharding,
            folders=save_distributed_checkpoint,
            rebalance=rebalance,
            divergence=Divergence(digest_every, on_divergence),
        )
        self.parallelism = self._sharded

    @override
    def on_validation_end(self) -> None:
        """Reshard what FSDP2 leaves gathered after a forward: hooks that change parameters find the shards."""
        reshard(self.module)
        super().on_validation_end()

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Predict a batch; what tensor parallelism divides becomes whole, since one worker of a lane keeps it."""
        return apply_to_collection(super().predict_step(*args, **kwargs), DTensor, DTensor.full_tensor)

    @property
    def fabric(self) -> ReplicaFabric:
        """This worker's place in the world of replicas."""
        return self._sharded.member.fabric

    @property
    def shard_size(self) -> int:
        """Lanes of a replica, among which FSDP2 divides tensors."""
        return self._sharded.size

    @property
    def grad_norm(self) -> float:
        """Norm of the last finished step's gradients of the optimizer's parameters, before clipping."""
        return self._sharded.steps.grad_norm
