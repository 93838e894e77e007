"""The workload of `job_ddp` inside NVRx's in-process wrapper, one process per rank, as in its examples."""

import datetime
import os
from contextlib import AbstractContextManager
from pathlib import Path

import job_ddp
import torch.distributed as dist
from nvidia_resiliency_ext import inprocess

# The defaults are 60 and 90 s.
LIMITS = {"soft_timeout": datetime.timedelta(seconds=10), "hard_timeout": datetime.timedelta(seconds=15)}


@inprocess.Wrapper(store_kwargs={"port": int(os.environ["MASTER_PORT"]) + 1}, **LIMITS)
def main(call_wrapper: inprocess.CallWrapper = None) -> None:  # type: ignore[assignment]  # it wants this class alone
    wrapper = call_wrapper
    rank, world, iteration = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), wrapper.iteration
    if iteration:
        job_ddp.log("reacted")

    class Checkpoints(job_ddp.Checkpoints):
        def after_step(self, step: int) -> None:
            wrapper.ping()
            super().after_step(step)

        def saving(self) -> AbstractContextManager[object]:
            return wrapper.atomic()

    store = dist.FileStore(str(Path(os.environ["BENCH_LOG"]) / f"store{iteration}"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    job_ddp.train(Checkpoints)


if __name__ == "__main__":
    main()
