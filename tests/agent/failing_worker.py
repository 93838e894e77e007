"""A script that ends before it imports anything of torch."""

import this_module_does_not_exist  # noqa: F401
