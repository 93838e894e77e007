"""Scenarios whose records differ, each for a reason that docs/differences.md gives."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

MOST: Final = 40
MOST_PAIRED: Final = 65
MOST_TRIPLED: Final = 10


@dataclass(frozen=True, kw_only=True)
class Named:
    """A scenario that differs.

    Attributes:
        row: start of its row in docs/differences.md.
        places: regular expression of the places of the record that may differ.
    """

    row: str
    places: str = ".*"

    def explains(self, place: str) -> bool:
        """Whether a place of the record may differ."""
        return re.match(self.places, place) is not None


_RANDOM: Final = Named(row="random samplers")
_FIRST_BATCH: Final = Named(
    row="a loader that is read once", places=r"steps|read|trainer0\.(counters\.0|hooks|metrics|parameters)"
)
_DOUBLE: Final = Named(row="`self.log` in `training_step`", places=r"trainer0\.metrics\.\d\.\w+\.1")
_MESSAGE: Final = Named(row="wrong values", places=r"error\.message|, rank")
"""In two processes the task is ended before its workers have written their records."""

NAMED: Final[dict[str, Named]] = {
    **{
        f"data.training_loader[{name}]": _RANDOM
        for name in ("generator", "random_sampler", "subset_sampler", "weighted")
    },
    "data.validation_loader[generator]": _RANDOM,
    "data.prediction_loader[generator]": _RANDOM,
    "callbacks.pruning[random]": Named(row="random numbers of hooks", places=r"trainer0\.(metrics|parameters)"),
    "data.training_loader[combined_sequential]": Named(row="several training loaders", places=r"trainer0\.counters\.3"),
    "reading.second_fit[same_trainer]": _FIRST_BATCH,
    "reading.reloaded_generators[each]": _FIRST_BATCH,
    "reading.reloaded_generators[second]": _FIRST_BATCH,
    "checkpoints.resumed[step_to_step]": Named(
        row="a checkpoint written within a data epoch is resumed", places=r"warnings|trainer1\.(metrics|parameters)"
    ),
    "logged.value_in_training[double]": _DOUBLE,
    "logged.value_in_validation[double]": _DOUBLE,
    "logged.twice_in_a_step": Named(
        row="`self.log` in `training_step`", places=r"trainer0\.metrics\.\d\.value_step\.2"
    ),
    "logged.metric_objects[wrong_attribute]": Named(row="wrong values"),
    "loops.returned[text]": _MESSAGE,
    "loops.returned[missing]": _MESSAGE,
    "loops.returned[number]": _MESSAGE,
    "runs.argument[accumulate]": Named(row="wrong values"),
    "runs.argument[accumulate_share]": Named(row="wrong values"),
    "optimizing.manual[plain_backward]": Named(row="manual optimization: `loss.backward()`"),
    "trainers.loader_that_yields_none": Named(
        row="`training_step` that returns None", places=r"warnings|trainer0\.(counters\.0|hooks)"
    ),
    "optimizing.automatic_without_gradient": Named(row="`backward` of a step", places=r"trainer0\.hooks"),
    "optimizing.gradients_in_hooks": Named(row="`backward` of a step", places=r"zero\d"),
    "runs.order_of_backward": Named(row="`backward` of a step", places="calls"),
    "callbacks.stochastic_weight_averaging[norms]": Named(
        row="`StochasticWeightAveraging` with BatchNorm", places=r"trainer0\.(counters\.0|hooks)"
    ),
    "loops.batch_norm_that_trains_in_validation[running]": Named(
        row="buffers that an evaluation changes", places=r"trainer0\.parameters\.norm\.(running_|num_batches)"
    ),
    "interfaces.environment_of_a_plugin": Named(row="a `ClusterEnvironment` among the `plugins`", places="environment"),
}

_NO_LENGTH: Final = Named(row="iterable datasets", places=r"warnings|trainer0\.(counters\.3|batches\.0\.0)")
_SAMPLES: Final = Named(row="the end of the data")
_OUTPUTS: Final = Named(row="`outputs` in `on_train_batch_end`", places="outputs")
_STATE: Final = Named(
    row="`on_save_checkpoint`", places=r"data_calls|calls|counts\.\[LightningModule\]Net\.on_save_checkpoint"
)
_UNFROZEN: Final = Named(row="parameters that are unfrozen during training")
_RATE_FINDER: Final = Named(row="`LearningRateFinder`")
_LOST_SIZE: Final = Named(row="a `BatchSampler` in the `DataLoader`")

PAIRED: Final[dict[str, Named]] = {
    "data.training_loader[list]": _NO_LENGTH,
    "data.training_loader[stream_sized]": _NO_LENGTH,
    "data.validation_loader[list]": _NO_LENGTH,
    "data.validation_loader[stream_sized]": _NO_LENGTH,
    "data.prediction_loader[stream_sized]": _NO_LENGTH,
    "loops.returned[loss]": _OUTPUTS,
    "loops.returned[dict]": _OUTPUTS,
    **{f"callbacks.spikes[{name}]": Named(row="`outputs` in `on_train_batch_end`") for name in ("found", "infinite")},
    "logged.in_validation_step[rank_zero]": Named(
        row="`self.log(rank_zero_only=True)` in a step", places=r"rows|alone|trainer\d\.metrics|warnings"
    ),
    **{
        f"logged.metric_objects[{name}]": Named(
            row="torchmetrics objects in `training_step`", places=r"rows|trainer0\.metrics"
        )
        for name in ("mean", "both", "step", "reduction", "attribute")
    },
    "logged.callback_metrics_during_the_run": Named(row="hooks of a sanity check", places="validation0_0"),
    **{
        name: Named(row="hooks of a sanity check", places=r"trainer0\.metrics")
        for name in (
            "logged.in_hook[on_validation_end]",
            "logged.in_callback[on_validation_end]",
            "failing.interrupt_in_callback[on_validation_epoch_end]",
        )
    },
    "data.training_loader[sampler]": _SAMPLES,
    "data.validation_loader[sampler]": _SAMPLES,
    "data.training_loader[batch_sampler]": _LOST_SIZE,
    "data.validation_loader[batch_sampler]": _LOST_SIZE,
    "data.training_loader[batch_list]": _LOST_SIZE,
    "data.validation_loader[batch_list]": _LOST_SIZE,
    **{f"runs.hooks[{name}]": _STATE for name in ("fit", "without_validation", "clipped", "by_interval")},
    "runs.hooks_of_a_resumed_run": _STATE,
    "data.data_module[fit]": _STATE,
    "data.data_module_on_exception": _STATE,
    "data.data_module_of_sets": Named(row="`use_distributed_sampler=False`", places=r"trainer0\.batches"),
    "data.data_module_in_turn": _STATE,
    "data.data_module_as_loader": _STATE,
    "data.transfer_hooks_of_data_module[fit]": _STATE,
    **{f"tools.profiler[{name}]": _STATE for name in ("simple", "file", "simple_text")},
    "callbacks.stochastic_weight_averaging[norms]": Named(
        row="BatchNorm's running statistics", places=r"trainer0\.(metrics|parameters)"
    ),
    **{f"callbacks.finetuning[{name}]": _UNFROZEN for name in ("first", "second", "norms")},
    "callbacks.finetuning_resumed": _UNFROZEN,
    **{
        f"callbacks.backbone_finetuning[{name}]": _UNFROZEN
        for name in ("plain", "ratio", "rate", "unaligned", "verbose", "norms")
    },
    **{f"callbacks.rate_finder[{name}]": _RATE_FINDER for name in ("exponential", "linear", "kept", "early", "few")},
    **{f"tools.lr_find[{name}]": _RATE_FINDER for name in ("plain", "linear", "few", "range", "attribute")},
    "failing.fit_after_an_error": Named(row="an error that ends a run", places=r", rank"),
    "runs.sampler_of_ddp": Named(row="`trainer.distributed_sampler_kwargs`", places=r"given\.num_replicas"),
    **{f"data.demo_modules[{name}]": Named(row="random numbers of hooks") for name in ("boring", "manual")},
    "callbacks.state_of_a_callback_that_is_not_plain": Named(row="callbacks' and schedulers' state"),
}
"""Scenarios that differ in two processes; those of `NAMED` may differ there, too."""

_ROUNDED: Final = Named(row="rounding, if M is no power of two", places=r"trainer0\.(metrics|parameters)|whole|weights")

TRIPLED: Final[dict[str, Named]] = {
    **{f"loops.fit[{name}]": _ROUNDED for name in ("bfloat", "bfloat_true", "half_true", "half_mixed")},
    "checkpoints.contents_of[bfloat]": _ROUNDED,
    "optimizing.configure_optimizers[one_cycle]": _ROUNDED,
    "callbacks.spikes[late]": _ROUNDED,
    "callbacks.spikes[maximum]": Named(row="`outputs` in `on_train_batch_end`"),
    "data.demo_data_module": _SAMPLES,
}
"""Scenarios that differ in three processes only; those of `NAMED` and `PAIRED` may differ there, too."""
