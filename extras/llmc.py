"""python -m extras.llmc: see extras/weights/llmc.py."""

from data import DataError
from extras.weights.llmc import main
from kit.errors import run

if __name__ == "__main__":
    run(main, (DataError,))
