"""The agent worker: a daemon that works through a list of tasks and never does finished work twice."""

__version__ = "0.1.0"
