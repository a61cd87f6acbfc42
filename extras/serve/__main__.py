"""python -m extras.serve"""

from extras.serve.server import main
from kit.errors import run

run(main, mistakes=(FloatingPointError,))
