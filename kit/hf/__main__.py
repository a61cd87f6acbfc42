"""Hugging Face: import GPT-2's weights from its hub or a folder, export a run for its library.

    python -m kit.hf import gpt2 --out_dir=out/gpt2
    python -m kit.hf export out/small exported
"""

from functools import partial
from pathlib import Path

from data.prepare import Parser, tell
from kit.errors import run
from kit.hf.importing import import_model, next_step
from kit.run.locate import out_root


def main(argv: list[str]) -> int:
    """Run the command; returns 0."""
    parser = Parser(prog="python -m kit.hf", description=__doc__.splitlines()[0],
                    allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, parser_class=partial(
        Parser, allow_abbrev=False))
    add = commands.add_parser("import", help="GPT-2's weights become a checkpoint").add_argument
    add("name", metavar="NAME", help="of the hub (gpt2, gpt2-medium, openai-community/gpt2, ...), "
        "or a folder with config.json and model.safetensors")
    add("--out_dir", type=Path, help="where it is written (default: out/NAME)")
    add("--tokenizer", metavar="SPEC", help="for a folder without one: gpt2, byte, a tokenizer.json"
        " of ours, ...")
    add("--overwrite", action="store_true", help="replace weights that were imported before")
    add = commands.add_parser("export", help="a run becomes a folder for transformers").add_argument
    add("run", nargs="?", metavar="RUN", help="a run's folder or a checkpoint's (default: the "
        "newest run)")
    add("folder", metavar="DIR", type=Path, help="the new folder")
    add("--step", type=int, help="which checkpoint of the run (default: the best)")
    add("--overwrite", action="store_true", help="replace an export that is there")
    args, unknown = parser.parse_known_args(argv)
    if unknown:  # told by the one that knows the nearest name
        commands.choices[args.command].error(f"unrecognized arguments: {unknown[0]}")
    if args.command == "export":
        from kit.hf.exporting import export_run

        export_run(args.run, args.folder, args.step, args.overwrite, tell)
        return 0
    name = Path(args.name).resolve().name if Path(args.name).is_dir() else Path(args.name).name
    out_dir = args.out_dir or out_root() / name
    import_model(args.name, out_dir, args.tokenizer, args.overwrite)
    tell(next_step(out_dir))
    return 0


if __name__ == "__main__":
    run(main)
