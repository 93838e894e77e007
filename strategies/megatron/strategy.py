"""The Lightning strategy ``unicron_megatron``: megatron-core's parallelism, trained straight through failures.

The module builds its stage of the model in ``configure_model``; Megatron's schedules, data parallelism and optimizers
do the rest, unpatched. The unit of failure is a replica of the model, TP x max(CP, EP) x PP workers (docs/megatron.md).
Data, logging, joining and Lightning's loops work as with `UnicronStrategy`.
"""

from __future__ import annotations

from megatron.core.distributed import DistributedDataParallelConfig

from unicron_lightning.errors import ConfigError
from unicron_lightning.megatron.sharded import check_redundancy
from unicron_lightning.replica.fabric import ReplicaFabric
from unicron_lightning.replica.layout import Shape
from unicron_lightning.replica.mirror import Redundancy
from unicron_lightning.strategies.fault_tolerant import FaultTolerantStrategy
from unicron_lightning.strategies.megatron.parallel import MegatronParallel
from unicron_lightning.worker.comparison import Divergence, OnDivergence


class UnicronMegatronStrategy(FaultTolerantStrategy):
    """Training with megatron-core through failures.

    Args:
        tensor_model_parallel_size: TP, unless an operator has ordered another one since.
        pipeline_model_parallel_size: PP; the same.
        virtual_pipeline_model_parallel_size: virtual stages of each worker, for Megatron's interleaved schedule; None
            or 1: none. They need several pipeline stages.
        context_parallel_size: CP: workers of a replica that divide each sequence among them.
        expert_model_parallel_size: EP: workers of a replica that divide the experts among them, each computing
            micro-batches of its own.
        ddp: configuration of Megatron's data parallelism.
        sequence_length: length of the tensors between pipeline stages; default: the model's ``max_sequence_length``.
        num_micro_batches: M of a global batch, instead of accumulate_grad_batches x replicas.
        redundancy: redundancy of the distributed optimizer's shards (``ddp.use_distributed_optimizer``); default: one
            copy of each.
        digest_every, on_divergence: comparison of the replicas' parameters, shard by shard; see `UnicronStrategy`.
        reproducible: must be False.
        compare: workers are compared when the task begins and at each join, by all but their parts of the model; see
            `UnicronStrategy`.
        witness_every: k: in every k-th step each replica repeats a row of another one, and their gradients' bits are
            compared before the reduction, which then overlaps with no backward; see `UnicronStrategy`.

    Raises:
        ConfigError: for settings that can't be supported exactly; see `checks`.
    """

    strategy_name = "unicron_megatron"
    names_all = False
    """Whether each worker's module has all parameters of the model, be they divided or not."""

    def __init__(
        self,
        *,
        tensor_model_parallel_size: int = 1,
        pipeline_model_parallel_size: int = 1,
        virtual_pipeline_model_parallel_size: int | None = None,
        context_parallel_size: int = 1,
        expert_model_parallel_size: int = 1,
        ddp: DistributedDataParallelConfig | None = None,
        sequence_length: int | None = None,
        num_micro_batches: int | None = None,
        redundancy: Redundancy | None = None,
        digest_every: int = 100,
        on_divergence: OnDivergence = "heal",
        reproducible: bool = False,
        compare: bool = True,
        witness_every: int | None = None,
    ) -> None:
        if reproducible:
            raise ConfigError(
                "reproducible=True: Megatron adds the gradients of micro-batches in its own buffers, as floats; "
                "expected False, or unicron_fsdp"
            )
        super().__init__(num_micro_batches=num_micro_batches, compare=compare, witness_every=witness_every)
        virtual = 1 if virtual_pipeline_model_parallel_size is None else virtual_pipeline_model_parallel_size
        for name, size in (
            ("tensor_model_parallel_size", tensor_model_parallel_size),
            ("pipeline_model_parallel_size", pipeline_model_parallel_size),
            ("virtual_pipeline_model_parallel_size", virtual),
            ("context_parallel_size", context_parallel_size),
            ("expert_model_parallel_size", expert_model_parallel_size),
        ):
            if size < 1:
                raise ConfigError(f"{name}={size!r}: expected 1 or more")
        if virtual > 1 and pipeline_model_parallel_size == 1:
            raise ConfigError(
                f"virtual_pipeline_model_parallel_size={virtual} with pipeline_model_parallel_size=1: one stage runs "
                "no pipeline; expected 2 stages or more, or None"
            )
        sizes = context_parallel_size, expert_model_parallel_size
        if max(sizes) % min(sizes):
            raise ConfigError(
                f"context_parallel_size={sizes[0]} with expert_model_parallel_size={sizes[1]}: a replica is as many "
                "columns as the larger one; expected a multiple of the other"
            )
        ddp = ddp if ddp is not None else DistributedDataParallelConfig()
        shape = Shape(
            tensor=tensor_model_parallel_size,
            pipeline=pipeline_model_parallel_size,
            expert=expert_model_parallel_size,
            context=context_parallel_size,
            virtual=virtual,
            replicas=1,
        )
        self._grid = MegatronParallel(
            self,
            shape=shape,
            ddp=ddp,
            sequence_length=sequence_length,
            redundancy=check_redundancy(redundancy, distributed=ddp.use_distributed_optimizer),
            divergence=Divergence(digest_every, on_divergence),
        )
        self.parallelism = self._grid

    @property
    def fabric(self) -> ReplicaFabric:
        """This worker's place in the grid of replicas."""
        return self._grid.member.fabric

    @property
    def tensor_model_parallel_size(self) -> int:
        """The present TP, for which ``configure_model`` has to build."""
        return self._grid.shape.tensor

    @property
    def pipeline_model_parallel_size(self) -> int:
        """The present PP."""
        return self._grid.shape.pipeline

    @property
    def virtual_pipeline_model_parallel_size(self) -> int | None:
        """The present number of virtual stages of a worker; None without them, as in Megatron's configuration."""
        return self._grid.shape.virtual if self._grid.shape.virtual > 1 else None

    @property
    def virtual_stage(self) -> int:
        """Virtual stage of this worker whose forward runs now: ``training_step`` calls that part of the model."""
        return self._grid.virtual_stage

    @property
    def context_parallel_size(self) -> int:
        """The present CP."""
        return self._grid.shape.context

    @property
    def expert_model_parallel_size(self) -> int:
        """The present EP."""
        return self._grid.shape.expert

    @property
    def coordinate(self) -> tuple[int, int]:
        """Tensor-parallel rank and pipeline stage."""
        return self._grid.coordinate

    @property
    def grad_norm(self) -> float:
        """Norm of the last finished step's gradients, before clipping."""
        return self._grid.steps.grad_norm
