"""python -m extras.llmc: see extras/weights/llmc.py."""

from kit.errors import run


def main(argv: list[str]) -> int:
    from extras.weights.llmc import main  # needs the folder kit/hf

    return main(argv)


if __name__ == "__main__":
    run(main)
