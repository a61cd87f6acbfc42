"""The parts that train.py and sample.py are built from; each file can be read alone."""
