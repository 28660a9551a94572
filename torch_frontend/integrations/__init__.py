"""Our ops in other libraries. Each module is optional, and no other module imports it."""
