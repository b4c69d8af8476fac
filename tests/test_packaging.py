"""What holds for the repository as a whole: the environment, the direction of imports, paths, the Makefile."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("qcfuse", "runners", "kernels", "analysis")
# Rooms from the top down; a module may import its own layer or a lower one.
LAYERS = {
    "run": 6, "runners": 5, "qcfuse.engine": 4, "qcfuse.models": 3, "qcfuse.loggers": 3, "qcfuse.fusion": 3,
    "qcfuse.selectors": 3, "qcfuse.anchors": 3, "qcfuse.store": 3, "qcfuse.data": 3, "qcfuse.metrics": 3,
    "qcfuse.decoder": 3, "qcfuse": 2, "kernels": 1,
}  # fmt: skip
BOTTOM = {"qcfuse.types"}
"""Modules under everything: they import nothing of this project."""


def sources() -> list[Path]:
    files = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return [*files, *[path for path in [ROOT / "run.py"] if path.exists()]]


def module_name(path: Path) -> str:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """(module, line) of every import, also inside functions and under TYPE_CHECKING."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import; write it in full"
            yield node.module or "", node.lineno


def is_inside(module: str, room: str) -> bool:
    return module == room or module.startswith(f"{room}.")


def layer_of(module: str) -> int | None:
    """The layer of the longest room that holds the module; None for code that is not this project's."""
    if module in BOTTOM:
        return 0
    rooms = [room for room in LAYERS if is_inside(module, room)]
    return LAYERS[max(rooms, key=len)] if rooms else None


def upward_imports() -> list[str]:
    wrong = []
    for path in sources():
        own = layer_of(module_name(path))
        for module, line in imports(path):
            other = layer_of(module)
            if own is not None and other is not None and other > own:
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {module}")
    return wrong


def test_imports_go_one_way() -> None:
    assert upward_imports() == []


def test_layers_know_their_order() -> None:
    assert layer_of("qcfuse.engine.vllm.connector") > layer_of("qcfuse.fusion.loop") > layer_of("kernels.score")
    assert layer_of("qcfuse.types") == 0 and layer_of("torch") is None and layer_of("kernelsx") is None


def test_bottom_modules_import_nothing_of_ours() -> None:
    for path in sources():
        if module_name(path) in BOTTOM:
            assert [module for module, _ in imports(path) if layer_of(module) is not None] == [], path


def test_analysis_imports_no_torch_and_no_engine() -> None:
    banned = ("torch", "transformers", "vllm", "triton", "runners", "kernels", "qcfuse.engine", "qcfuse.fusion")
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in sorted((ROOT / "analysis").rglob("*.py"))
        for module, line in imports(path)
        if any(is_inside(module, room) for room in banned)
    ]
    assert wrong == []


def test_only_its_own_room_imports_vllm() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in sources()
        for module, line in imports(path)
        if is_inside(module, "vllm") and not is_inside(module_name(path), "qcfuse.engine.vllm")
    ]
    assert wrong == []


def test_packages_can_be_imported_whole() -> None:
    """Every folder with Python files is a package, or the install would leave it out."""
    folders = {path.parent for path in sources() if path.parent != ROOT}
    assert [str(folder.relative_to(ROOT)) for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


def installed() -> set[str]:
    return {dist.metadata["Name"].lower().replace("_", "-") for dist in importlib.metadata.distributions()}


@pytest.mark.parametrize("name", ["kernels", "torchvision", "torchaudio", "torchcodec"])
def test_package_stays_out(name: str) -> None:
    """`kernels` (Hugging Face) would be shadowed by ours; the others break against the CPU build of torch."""
    assert name not in installed()


def test_transformers_does_not_take_our_kernels_for_the_hubs() -> None:
    from transformers.utils.import_utils import is_kernels_available

    assert not is_kernels_available()


def locked(name: str) -> dict[str, str]:
    lines = [line.split(";")[0].strip() for line in (ROOT / "requirements" / name).read_text().splitlines()]
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.!+]+", pin) for pin in pins), "the CPU lock pins every package with =="
    return {pin.split("==")[0].lower().replace("_", "-"): pin.split("==")[1] for pin in pins}


def test_cpu_lock_fits_the_declared_ranges() -> None:
    from packaging.requirements import Requirement

    pins = locked("cpu.txt")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert not {"kernels", "torchvision", "torchaudio", "torchcodec"} & set(pins)
    for text in [*project["dependencies"], *project["optional-dependencies"]["cpu"]]:
        requirement = Requirement(text)
        assert pins[requirement.name.lower().replace("_", "-")] in requirement.specifier, text


def test_no_absolute_paths_or_index_hosts() -> None:
    """No path of one machine and no package index in anything that is written here."""
    machine_path = re.compile(r"[\"'\s=(](/(?:home|root|work|tmp|Users|mnt|opt)/[\w.-]+)")
    index_host = re.compile(r"https?://[^\s\"']*(?:pypi|/simple|/whl)")
    suffixes = {".py", ".yaml", ".toml", ".txt", ".md", ".sh", ""}
    folders = [*PACKAGES, "conf", "tests", "requirements", "docs", ".ci"]
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    files += [path for path in ROOT.iterdir() if path.is_file()]
    wrong = []
    for path in files:
        if path.suffix in suffixes and "__pycache__" not in path.parts:
            text = path.read_text(encoding="utf-8", errors="replace")
            found = [match[1] for match in machine_path.finditer(text)] + [m[0] for m in index_host.finditer(text)]
            wrong += [f"{path.relative_to(ROOT)}: {item}" for item in found]
    assert wrong == []


def test_make_help_lists_every_target() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    phony = re.search(r"^\.PHONY: (.+)$", text, re.MULTILINE)[1].split()
    shown = subprocess.run(["make", "-s", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert sorted(line.split()[0] for line in shown.splitlines()) == sorted(phony)
    assert all(len(line.split()) > 2 for line in shown.splitlines()), "each target says what it does"
