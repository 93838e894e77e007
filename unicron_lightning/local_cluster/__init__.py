"""A cluster of real processes on this machine, for notebooks, tests and demonstrations. Guide: docs/faults.md.

`cluster.LocalCluster`, also importable as `unicron_lightning.LocalCluster`, starts a coordinator and agents;
`processes` starts and stops groups of processes.
"""
