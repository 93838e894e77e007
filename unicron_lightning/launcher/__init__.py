"""Behind ``hydra/launcher=unicron``: a sweep's jobs as tasks of one cluster. Guide: docs/launcher.md.

`launch.launch` is what Hydra's plugin calls, `job` makes of each of Hydra's jobs a task's definition, `sweep` submits
them and waits, `result` brings back what the scripts return, `local` runs a cluster where there is none.
"""
