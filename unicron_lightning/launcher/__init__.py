"""The implementation of ``hydra/launcher=unicron``: a sweep's jobs as tasks of one cluster. Guide: docs/cluster.md.

Hydra's plugin calls `launch.launch`, which submits the jobs and waits; `job` converts each of Hydra's jobs to a task's
definition, and returns the result of its script.
"""
