"""Checks that take seconds and come before anything that takes long. Each module is one, with a command of its own."""
