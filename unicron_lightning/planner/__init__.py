"""Number of workers per task: the cost model, the optimal plan, and the plans made ahead.

Pure: no files, no network, no clock; times and rates are arguments. Importing this package loads nothing else; numba
(the extra ``plan``) is imported for large plans only. Read in this order:

* `unicron_lightning.planner.performance`: T(t,x), from a table, from measurements or from a model;
* `unicron_lightning.planner.reward`: the planner's view of a task, F(t,x) and G(t,x');
* `unicron_lightning.planner.state`: the situation that is planned for, and the possible next events;
* `unicron_lightning.planner.solver`: the best plan, its explanation, and the plans for all possible next events.
"""
