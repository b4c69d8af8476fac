"""Command line: python -m analysis figures [NAME ...] | demo | table EXPERIMENT | publish EXPERIMENT."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from analysis import cb17, fidelity, fig01, fig09, fig10, fig11, fig13, series, tables, trace
from analysis.cells import Cell, Loaded, MissingCells, command_for, load, publish
from analysis.log import log_figures
from analysis.summary import holes


def main_holes(loaded: Loaded) -> tuple[Cell, ...]:
    """Of the main bandwidth, which is all that most figures show."""
    return holes(series.only(loaded))


@dataclass(frozen=True)
class Figure:
    """draw(what load returned, outputs, name) -> paths, the PNG last; experiment: whose cells it reads.

    missing: the cells that the figure wants and what was loaded lacks.
    """

    draw: Callable[..., list[Path]]
    experiment: str
    load: Callable[..., Loaded | trace.Trace] = load
    missing: Callable[..., tuple[Cell, ...]] = main_holes


FIGURES = {
    "fig01": Figure(fig01.draw, "fig01", missing=fig01.missing),
    "fig09": Figure(fig09.draw, "fig09", load=trace.load, missing=lambda traced: ()),
    "fig10": Figure(fig10.draw, "fig10", missing=holes),
    "fig11": Figure(fig11.draw, "fig10"),
    "fidelity": Figure(fidelity.draw, "fig10"),
    "fig13": Figure(fig13.draw, "fig13", missing=fig13.missing),
    "cb17": Figure(cb17.draw, "cb17", missing=cb17.missing),
    "demo": Figure(fig10.draw, "demo", missing=holes),
    "demo_fidelity": Figure(fidelity.draw, "demo"),
}
PUBLISH = {"fig09": trace.publish}
"""Experiments whose published form is not the table of their records."""


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
    cache: dict[tuple, Loaded | trace.Trace] = {}
    for name in args.names or FIGURES:
        figure = FIGURES[name]
        key = (figure.load, figure.experiment)
        try:
            loaded = cache[key] = cache.get(key) or figure.load(args.outputs, figure.experiment, args.source)
            paths = figure.draw(loaded, args.outputs, name)
        except MissingCells as missing:
            undrawn[name] = missing
            continue
        drawn[name] = (figure.experiment, paths[-1])
        print(f"{name}: {paths[-1]} (and .pdf, .csv) from {loaded.source}")
        _report_holes(name, figure.missing(loaded))
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
    print(tables.markdown(loaded, args.by_dataset, args.bandwidth))
    print(f"{args.experiment}: from {loaded.source}", file=sys.stderr)
    return 0


def publish_cells(args: argparse.Namespace) -> int:
    path = PUBLISH.get(args.experiment, publish)(args.outputs, args.experiment)
    print(f"{path}: {path.stat().st_size / 1e6:.2f} MB")
    return 0


def _report_holes(name: str, cells: tuple[Cell, ...]) -> None:
    if cells:
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
    table.add_argument("--bandwidth", help="as in the paths of cells, or all (default: 10, else the fastest link)")
    command("publish", publish_cells, "write outputs/published/EXPERIMENT.csv").add_argument("experiment")
    return parser


if __name__ == "__main__":
    sys.exit(main())
