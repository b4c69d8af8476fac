"""Command line: python -m analysis figures [NAME ...] | demo | table EXPERIMENT | publish EXPERIMENT."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path

from analysis import fidelity, fig10, fig11, tables
from analysis.cells import Loaded, MissingCells, command_for, load, publish
from analysis.log import log_figures
from analysis.summary import holes

FIGURES: dict[str, tuple[Callable[..., list[Path]], str]] = {
    "fig10": (fig10.draw, "fig10"),
    "fig11": (fig11.draw, "fig10"),
    "fidelity": (fidelity.draw, "fig10"),
    "demo": (fig10.draw, "demo"),
    "demo_fidelity": (fidelity.draw, "demo"),
}
"""Figure -> what draws it, and the experiment whose cells it reads."""


def main(argv: Sequence[str] | None = None) -> int:
    """-> exit status: 1 where something asked for by name cannot be done, with the reason on stderr."""
    args = _parser().parse_args(argv)
    try:
        return args.run(args)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1


def draw_figures(args: argparse.Namespace) -> int:
    """Draws what has data; lists, with commands, what has not. 1 if a figure that was named could not be drawn."""
    if unknown := [name for name in args.names if name not in FIGURES]:
        near = get_close_matches(unknown[0], FIGURES, n=1) or list(FIGURES)
        raise ValueError(f"no figure is called {unknown[0]!r}; did you mean {', '.join(near)}?")
    drawn: dict[str, tuple[str, Path]] = {}
    undrawn: dict[str, MissingCells] = {}
    cache: dict[str, Loaded] = {}
    for name in args.names or FIGURES:
        draw, experiment = FIGURES[name]
        try:
            loaded = cache[experiment] = cache.get(experiment) or load(args.outputs, experiment, args.source)
            paths = draw(loaded, args.outputs, name)
        except MissingCells as missing:
            undrawn[name] = missing
            continue
        drawn[name] = (experiment, paths[-1])
        print(f"{name}: {paths[-1]} (and .pdf, .csv) from {loaded.source}")
        _report_holes(name, loaded)
    for name, missing in undrawn.items():
        print(f"{name}: not drawn; {missing}")
    if args.log:
        log_figures(args.outputs, drawn)
    return 1 if args.names and undrawn else 0


def draw_demo(args: argparse.Namespace) -> int:
    """The demo experiment: its two figures and a short table."""
    args.names = ["demo", "demo_fidelity"]
    if status := draw_figures(args):
        return status
    print(f"\n{tables.short(load(args.outputs, 'demo', args.source))}")
    return 0


def print_table(args: argparse.Namespace) -> int:
    loaded = load(args.outputs, args.experiment, args.source)
    print(tables.markdown(loaded, args.by_dataset))
    print(f"{args.experiment}: from {loaded.source}", file=sys.stderr)
    return 0


def publish_cells(args: argparse.Namespace) -> int:
    path = publish(args.outputs, args.experiment)
    print(f"{path}: {path.stat().st_size / 1e6:.2f} MB")
    return 0


def _report_holes(name: str, loaded: Loaded) -> None:
    if cells := holes(loaded):
        print(f"{name}: incomplete, {len(cells)} cells missing:", *map(str, cells[:12]), sep="\n  missing  ")
        print(f"  run  {command_for(cells[0].experiment, cells)}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m analysis", description=__doc__)
    commands = parser.add_subparsers(required=True)

    def command(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text)
        sub.add_argument("--outputs", type=Path, default=Path("outputs"), help="where runs write (default: outputs)")
        sub.set_defaults(run=run)
        return sub

    def reads_either(sub: argparse.ArgumentParser) -> argparse.ArgumentParser:
        sub.add_argument("--source", choices=("auto", "cells", "published"), default="auto",
                         help="auto: cells first, then outputs/published")  # fmt: skip
        return sub

    figures = reads_either(command("figures", draw_figures, "draw every figure that has data, or those named"))
    figures.add_argument("names", nargs="*", metavar="NAME", help=", ".join(FIGURES))
    demo = reads_either(command("demo", draw_demo, "draw the demo experiment and print its numbers"))
    for sub in (figures, demo):
        sub.add_argument("--log", action="store_true", help="also log the images, as conf/logger/wandb.yaml says")
    table = reads_either(command("table", print_table, "print a markdown table"))
    table.add_argument("experiment")
    table.add_argument("--by-dataset", action="store_true", help="one table a dataset instead of the mean over them")
    command("publish", publish_cells, "write outputs/published/EXPERIMENT.csv").add_argument("experiment")
    return parser


if __name__ == "__main__":
    sys.exit(main())
