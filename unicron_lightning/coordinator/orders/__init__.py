"""Orders of users and operators: submitted tasks, drains, layouts, injected faults."""
