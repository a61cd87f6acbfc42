"""python -m extras.to_gguf: see extras/weights/gguf.py."""

from kit.errors import run


def main(argv: list[str]) -> int:
    from extras.weights.gguf import main  # needs the folder kit/hf

    return main(argv)


if __name__ == "__main__":
    run(main)
