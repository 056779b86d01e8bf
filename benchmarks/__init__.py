"""Benchmarks: what the pipeline reaches on the machine at hand, beside what bounds it there.

command.py   what the commands share: help, numbers, facts about the machine
extract.py   the command `python -m benchmarks.extract`: flags, phases one after the other, table, JSON
phases.py    what each phase does and measures
figures.py   what is made of the measurements: rates, medians, the target, the table
models.py    models of random weights, prompts, the run that the step `extract` is given
stock.py     speculators 0.3.0 as released, with only what it needs to run at all
load.py      the command `python -m benchmarks.load`: what training can read
train.py     the command `python -m benchmarks.train`: our trainer beside speculators 0.9.0's, table, JSON
training.py  both trainers, the rows that they are given, the count of operations
"""
