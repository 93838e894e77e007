"""How many workers each task should have: the cost model, the optimal plan, and the plans made ahead.

Pure: no files, no network, no clock; times and rates are arguments. Importing this package loads nothing else; numba
comes with `unicron_lightning.planner.solver`. Read in this order:

* `unicron_lightning.planner.task`: what the planner knows of a task;
* `unicron_lightning.planner.performance`: T(t,x), from a table, from measurements or from a model;
* `unicron_lightning.planner.reward`: F(t,x) and G(t,x');
* `unicron_lightning.planner.state` and `events`: the situation that a plan is for, and what may happen next;
* `unicron_lightning.planner.solver`: the best plan, and why it is that one;
* `unicron_lightning.planner.table`: the plans for all that may happen next.
"""
