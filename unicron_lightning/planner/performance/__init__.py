"""T(t,x): achieved aggregate FLOP/s of a task on x workers, from a table, from measurements, or from a model."""
