"""The coordinator: one process per cluster that decides, per task, which workers train together.

`machine.Machine` is the pure state machine with its `state`, inputs and actions (`events`); `server` is the shell that
gives it sockets and timers, `storage` what outlives the process. The rules are in the other modules.
"""
