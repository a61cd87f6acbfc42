"""python -m extras.nanogpt_bin: see extras/weights/nanogpt_bin.py."""

import sys

from extras.weights.nanogpt_bin import main

if __name__ == "__main__":
    sys.exit(main())
