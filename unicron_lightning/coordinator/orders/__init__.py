"""Orders of users and operators: submitted tasks, layouts, injected faults."""
