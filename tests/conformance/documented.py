"""Scenarios whose records differ, each for a reason that docs/differences.md gives."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

MOST: Final = 40


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
_STREAMS: Final = Named(row="iterable datasets")
_NO_LENGTH: Final = Named(row="iterable datasets", places=r"warnings|trainer0\.counters\.3")
_AT_ONCE: Final = Named(row="evaluations with a `CombinedLoader`")
_DOUBLE: Final = Named(row="`self.log` in `training_step`", places=r"trainer0\.metrics\.\d\.\w+\.1")
_BATCH_SIZE: Final = Named(row="`BatchSizeFinder`")
_MESSAGE: Final = Named(row="wrong values", places=r"error\.message")

NAMED: Final[dict[str, Named]] = {
    **{
        f"data.training_loader[{name}]": _RANDOM
        for name in ("generator", "random_sampler", "subset_sampler", "weighted")
    },
    "data.validation_loader[generator]": _RANDOM,
    "data.prediction_loader[generator]": _RANDOM,
    "callbacks.pruning[random]": Named(row="random numbers of hooks", places=r"trainer0\.(metrics|parameters)"),
    "data.training_loader[list]": _NO_LENGTH,
    "data.validation_loader[list]": _STREAMS,
    "data.prediction_loader[list]": _STREAMS,
    "data.training_loader[combined_sequential]": Named(row="several training loaders", places=r"trainer0\.counters\.3"),
    "data.training_loader[stream_sized]": _NO_LENGTH,
    "data.validation_loader[stream]": _STREAMS,
    "data.prediction_loader[stream]": _STREAMS,
    **{f"data.combined_validation[{name}]": _AT_ONCE for name in ("outer", "longest", "cycle")},
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
    "optimizing.automatic_without_gradient": Named(row="`backward` of a step", places=r"trainer0\.hooks"),
    "optimizing.gradients_in_hooks": Named(row="`backward` of a step", places=r"zero\d"),
    "runs.order_of_backward": Named(row="`backward` of a step", places="calls"),
    "callbacks.stochastic_weight_averaging[norms]": Named(
        row="`StochasticWeightAveraging` with BatchNorm", places=r"trainer0\.(counters\.0|hooks)"
    ),
    **{f"tools.scale_batch_size[{name}]": _BATCH_SIZE for name in ("power", "binary", "wrong")},
}
