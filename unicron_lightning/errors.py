"""All errors of this package, as one tree.

    UnicronError
    ├── ConfigError (also ValueError)       a value given by the user is wrong
    │   ├── NoLoss (strategies.micro_batch)  training_step returned neither a loss nor None
    │   └── CheckpointsChanged (checkpoints.reported)  no checkpoint of the task is as it was written
    ├── PortInUse                           another program listens on the coordinator's address
    ├── SessionRefused                      the coordinator refuses this agent
    ├── CoordinatorUnavailable              no coordinator answers at the endpoint
    │   └── CoordinatorUnproven             the process there does not know the token, or has another certificate
    │       └── TlsExpected (tls)           the port speaks TLS, the client did not
    ├── StoreUnusable (coordinator.database)  the coordinator's folder or database cannot be used
    ├── EtcdUnavailable (coordinator.etcd)  no member of etcd answers, or none can write
    ├── EtcdRefused (coordinator.etcd)      etcd will not carry out a call, however often it is repeated
    ├── Deposed (coordinator.replicated)    another coordinator leads, or the lease has ended
    ├── AgentUnavailable                    the worker has no agent, or lost it
    ├── RendezvousFailed (agent.handler)    reports to torchrun that this agent cannot take part
    ├── NotPlainData (worker.codec)         state to be sent contains something other than plain data
    ├── OutOfDescriptors (worker.sockets)   the process may open no more files
    ├── FitPassed (worker.session)          a worker's script and its task are in different fits
    ├── ProgramsDiffer                      the members' scripts have taken different paths
    ├── WorkersDiffer (worker.agreement)    this worker trains something else than the others
    ├── SilentCorruption                    this worker has computed a wrong gradient
    ├── GradientsDiffer                     gradients differ, and it is not known which worker's are wrong
    ├── ParametersDiffer (worker.agreement) this worker's parameters differ from those of most others
    ├── CollectiveInStep (strategies.collectives)  a collective where ranks run different numbers of batches
    ├── ShapesDiffer (strategies.collectives)  tensors to be gathered cannot be stacked
    ├── CollectiveRefused (strategies.process_group)  the default process group does not have a collective
    ├── MembersChanged (strategies.process_group)  members changed during a collective with one part per member
    ├── StreamChanged (data.streams)        an iterable data set that is read again has fewer batches than before
    ├── SweepJobFailed (launcher.launch)    a job of a Hydra sweep failed
    ├── ShardsLost (replica.mirror)        optimizer shards were lost with all their copies
    ├── StateLost (megatron.layout)         no replica can be formed that has the newest state of every shard
    ├── CheckpointLost (checkpoints.beside) nobody can write the newest checkpoint of a run that ends
    ├── StaleTable (planner.table)          plans made ahead are looked up in another state than theirs
    │   internal to the step protocol, never seen by users:
    ├── EpochMissed (wire.epoch_changes)    an epoch's difference does not fit the epoch that the agent has
    ├── CommunicatorAborted (worker.communicator)
    └── EpochChanged (worker.engine)

Errors with a module name are defined in the only module that raises them.

A message quotes the given value and states what was expected. The package's own invariants are ``assert``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final


class UnicronError(Exception):
    """Base of all errors raised on purpose by this package."""


class ConfigError(UnicronError, ValueError):
    """A value given by the user (option, argument, configuration) is wrong; the message states the allowed values."""


class PortInUse(UnicronError):
    """Another program, perhaps another coordinator, listens on the coordinator's address."""


class SessionRefused(UnicronError):
    """The coordinator refused this agent permanently; the message is its reason (e.g. token, differing min_nodes)."""


class CoordinatorUnavailable(UnicronError):
    """No coordinator answered at the endpoint within the time allowed."""


class CoordinatorUnproven(CoordinatorUnavailable):
    """The process at the endpoint cannot prove that it knows the token, or has another certificate; nothing usable was
    sent to it.
    """


class ProgramsDiffer(UnicronError):
    """The members are at different operations: their scripts have taken different paths.

    Args:
        places: operation of each group of members, e.g. ``{"rank 0": "barrier", "rank 1": "step"}``.
    """

    def __init__(self, places: Mapping[str, str]) -> None:
        where = ", ".join(f"{who} in {name!r}" for who, name in places.items())
        super().__init__(
            f"the members' scripts have taken different paths: {where}. All ranks must call the same functions of the "
            "trainer and of the strategy in the same order: look for a condition on the rank around such a call"
        )


class SilentCorruption(UnicronError):
    """This worker has computed another gradient than the others from the same parameters, samples and seed; it ends,
    and the step does without it.

    Args:
        message: names the worker, and the steps since it was last found right.
        suspect: the same as plain data, for the incident.
    """

    def __init__(self, message: str, suspect: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.suspect = dict(suspect)


class GradientsDiffer(UnicronError):
    """The ranks' gradients of a micro-batch differ, and no majority decides which are wrong; all workers end."""


class AgentUnavailable(UnicronError):
    """A worker has no agent: it was not started by ``torchrun --rdzv-backend unicron``, or its agent has died."""


_WORDS: Final = {(0, None): "a finite number > 0", (None, 0): "a finite number, 0 or more"}
_SIZE: Final = "a whole number of at least 1"


def check_numbers(
    holder: object,
    *names: str,
    above: int | None = None,
    least: int | None = None,
    expected: str | None = None,
    error: type[ValueError] = ValueError,
) -> None:
    """Require attributes to be finite numbers; one that is None is not given, and not checked.

    Args:
        holder: of the attributes.
        names: of the attributes.
        above: number that each must exceed.
        least: smallest number that each may have.
        expected: the permitted values in words; default: by ``above`` or ``least``.
        error: class of the error.

    Raises:
        ValueError: one is not, with its name and value; of the class ``error``.
    """
    for name in names:
        value = getattr(holder, name)
        if value is None:
            continue
        high_enough = (above is None or value > above) and (least is None or value >= least)
        if not (high_enough and -math.inf < value < math.inf):
            raise error(f"{name}={value!r}: expected {expected or _WORDS.get((above, least), _SIZE)}")
