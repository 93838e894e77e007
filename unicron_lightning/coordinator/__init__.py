"""The coordinator: one process per cluster that decides, per task, which workers train together.

`machine.Machine` is the pure state machine, `server.Server` the shell that gives it sockets, timers and a store.
"""
