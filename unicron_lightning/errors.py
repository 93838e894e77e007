"""All errors of this package, as one tree.

    UnicronError
    ├── ConfigError (also ValueError)       a value given by the user is wrong
    ├── PortInUse                           another program listens where the coordinator should
    ├── SessionRefused                      the coordinator will not have this agent
    ├── CoordinatorUnavailable              no coordinator answers at the endpoint
    │   └── CoordinatorUnproven             what answers there does not know the token
    ├── StoreUnusable (coordinator.database)  the coordinator's folder or database cannot be used
    ├── AgentUnavailable                    the worker has no agent, or lost it
    ├── RendezvousFailed (agent.handler)    torchrun is told that this agent can't take part
    ├── NotPlainData (worker.codec)         state to be sent holds something other than plain data
    ├── ProgramsDiffer (worker.engine)      the members' scripts have taken different paths
    ├── WorkersDiffer (worker.agreement)    this worker does not train what the others train
    ├── ParametersDiffer (worker.agreement) this worker's parameters are not those of most of the others
    ├── CollectiveInStep (strategies.collectives)  a collective where ranks run different numbers of batches
    ├── SweepJobFailed (launcher.launch)    a job of a Hydra sweep failed
    ├── ShardsLost (megatron.mirror)        optimizer shards died with all their copies
    ├── StateLost (megatron.layout)         no replica can be formed that has the newest state of every shard
    ├── StaleTable (planner.table)          plans made ahead are asked for in another state than theirs
    │   the step protocol's own, never seen by users:
    ├── CommunicatorAborted (worker.communicator)
    └── EpochChanged (worker.engine)

Those with a module behind them are defined beside the code that alone raises them.

A message quotes what was given and says what was expected. Broken invariants of the package's own are ``assert``.
"""

from __future__ import annotations


class UnicronError(Exception):
    """Base of all errors raised on purpose by this package."""


class ConfigError(UnicronError, ValueError):
    """A value given by the user (option, argument, configuration) is wrong; the message says what is allowed."""


class PortInUse(UnicronError):
    """Another program, perhaps another coordinator, listens at the coordinator's address."""


class SessionRefused(UnicronError):
    """The coordinator refused this agent for good; the message is its reason (e.g. token, differing min_nodes)."""


class CoordinatorUnavailable(UnicronError):
    """No coordinator answered at the endpoint within the time allowed."""


class CoordinatorUnproven(CoordinatorUnavailable):
    """What answers at the endpoint cannot prove that it knows the token; it was sent nothing that it could use."""


class AgentUnavailable(UnicronError):
    """A worker has no agent: it was not started by ``torchrun --rdzv-backend unicron``, or its agent is gone."""
