"""The crash campaign: a run of every kind of step, its worker killed at one system call after the other.

`make crash` runs a sample of the cases, `make crash CASES=all` every one, `make crash CASE=sqlite/write/40/KILL` one.
TWICE in the place of KILL: the worker that goes on is killed as well.
With `CASES=all SHARD=2/4` it is the second of four parts, so that several can run side by side.
Imports nothing of the program's but what reads a ledger.
"""
