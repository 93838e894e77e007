"""The data plane of a worker: communicators of an epoch over gloo and NCCL, which can be aborted."""
