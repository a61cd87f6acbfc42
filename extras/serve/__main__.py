"""python -m extras.serve"""

from data import DataError
from extras.serve.server import main
from kit.errors import run

run(main, mistakes=(DataError, FloatingPointError))
