"""Speed on a CPU. All that is computed here model.py computes too, in plain PyTorch and slower.

native, *.h, *.cpp   C++ that is compiled for this machine when it is first needed
quantize, leaves     nn.Linear with its weights in 16, 8 or 4 bits
step                 one whole step of the GPT in a single native call, for a model that was checked
operators            kernels under operators of PyTorch, and a loss, for training
speed                what a script calls: makes a model fast, and says what it did

Without this folder PyTorch's own kernels do it all, and sample.py holds weights in float32 alone.
"""

from kit.kernels.operators import Kernels, install, wanted
from kit.kernels.speed import fast

__all__ = ["Kernels", "fast", "install", "wanted"]
