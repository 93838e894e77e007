"""The implementation of ``hydra/launcher=unicron``: a sweep's jobs as tasks of one cluster. Guide: docs/cluster.md.

Hydra's plugin calls `launch.launch`; `job` converts each of Hydra's jobs to a task's definition, `sweep` submits them
and waits, `result` returns the results of the scripts.
"""
