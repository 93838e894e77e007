"""Workers that are forked by a prepared process, which has imported torch and Lightning, instead of started afresh.

The prepared process runs `parent`; a process that it has forked becomes a worker in `becoming`. The agent's side is
`unicron_lightning.agent.workers.forked`. See docs/decisions/0101-prepared-workers.md.
"""
