"""An agent's part in forking: prints the prepared process and its worker, and waits for the worker."""

import os
import sys

from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from unicron_lightning.agent.workers.forked import ForkedWorker, PreparedStarts

if __name__ == "__main__":
    starts = PreparedStarts(os.environ)
    starts.start()
    handler = SubprocessHandler(sys.executable, ("-u", *sys.argv[1:]), {}, None, None, 0, None)
    assert isinstance(handler.proc, ForkedWorker)
    print(starts.pid, handler.proc.pid, flush=True)
    handler.proc.wait()
