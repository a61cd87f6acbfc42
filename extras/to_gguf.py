"""python -m extras.to_gguf: see extras/weights/gguf.py."""

from data import DataError
from extras.weights.gguf import main
from kit.errors import run

if __name__ == "__main__":
    run(main, (DataError,))
