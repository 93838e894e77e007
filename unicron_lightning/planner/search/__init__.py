"""The exact search for the best plan: options as integers, tables of the dynamic program, and the plans in them."""
