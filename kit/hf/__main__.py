"""python -m kit.hf: import from Hugging Face, and export to it."""

from data import DataError
from kit.errors import run
from kit.hf.hub import main

run(main, (DataError,))
