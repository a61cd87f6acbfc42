"""Never lose a run: run folders, checkpoints on disk, signals, and what a run says of itself.

Not a door that can be taken out: train.py saves and goes on by it, sample.py finds runs by it.
"""
