"""python -m bench.decode: see bench/decode/command.py."""

from bench.decode.command import main
from data import DataError
from kit.errors import run

run(main, mistakes=(DataError,))
