"""python -m extras.nanogpt_ckpt: see extras/weights/nanogpt_ckpt.py."""

from data import DataError
from extras.weights.nanogpt_ckpt import main
from kit.errors import run

if __name__ == "__main__":
    run(main, (DataError,))
