"""A small Kimi-K2.5 for the tests, written from what is known of the large one."""
