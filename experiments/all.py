"""Put the saved results of all experiments into docs/EXPERIMENTS.md: tables and figures.

    python -m experiments.all

Nothing is measured here: `python -m experiments.NAME` does that, and saves its numbers in
experiments/results/NAME.json. What stands between <!-- NAME --> and <!-- /NAME --> is replaced.
"""

import importlib
import re
from typing import Any

from tqdm import tqdm

from data.prepare import Parser
from experiments.common import CLONE, FIGURES, figure, load, to_markdown
from kit import errors
from kit.files import write_text

NAMES = ("rank_collapse", "full_rank", "prefix_lm", "logn", "tied", "scale", "chain_of_thought",
         "in_context", "decoding_costs", "svm", "segmentation", "wider_window")
PAGE = CLONE / "docs" / "EXPERIMENTS.md"


def block(name: str, record: dict[str, Any]) -> str:
    """What the page shows of a result: figure, table and where they come from."""
    minutes, n = record["seconds"] / 60, record["workers"]
    made = (f"`python -m experiments.{name}`, {record['date']}, commit {record['commit']}: "
            f"{minutes:.1f} min in {n} process{'es' * (n > 1)} of one thread")
    table = importlib.import_module(f"experiments.{name}").table(record["result"])
    return f"![{name}](figures/{name}.png)\n\n{to_markdown(table)}\n\n*{made}*"


def rebuilt(page: str, blocks: dict[str, str]) -> str:
    """The page with these blocks; UserError if it has no place for one."""
    for name, text in blocks.items():
        place = re.compile(rf"(<!-- {name} -->\n)(?:.*?\n)?(<!-- /{name} -->)", re.DOTALL)
        page, n = place.subn(lambda m, text=text: f"{m[1]}{text}\n{m[2]}", page)
        if n != 1:
            raise errors.UserError(f"{PAGE} has {n} places for {name}, expected one: "
                                   f"<!-- {name} --> and <!-- /{name} --> on lines of their own")
    return page


def main(argv: list[str]) -> int:
    Parser(prog="python -m experiments.all", allow_abbrev=False,
           description=(__doc__ or "").partition("\n")[0]).parse_args(argv)
    records = {name: load(name) for name in NAMES}
    page = rebuilt(PAGE.read_text(encoding="utf-8"),
                   {name: block(name, record) for name, record in records.items()})
    for name, record in tqdm(records.items(), unit="figure"):
        figure(importlib.import_module(f"experiments.{name}"), record["result"],
               FIGURES / f"{name}.png")
    write_text(PAGE, page)
    return 0


if __name__ == "__main__":
    errors.run(main)
