"""python -m extras.nanogpt_ckpt: see extras/weights/nanogpt_ckpt.py."""

from kit.errors import run


def main(argv: list[str]) -> int:
    from extras.weights.nanogpt_ckpt import main  # needs the folder kit/hf

    return main(argv)


if __name__ == "__main__":
    run(main)
