"""The supervisor: keeps a run alive from outside, on machines that it has made and may lose."""
