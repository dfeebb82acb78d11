"""``python -m ablation pack DIR``: what a colleague needs to judge an ablation, as two files.

``<name>-report.html`` is the report, in one file. ``<name>.tar.gz`` holds the report and every run directory without
checkpoints, their tokenizer and profiles' traces, and compares again where it is unpacked.
"""

from __future__ import annotations

import argparse
import os
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

from ablation.compare import compare_directories
from ablation.report import write_report
from config.errors import ConfigError

LEFT_OUT_FOLDERS = frozenset({"checkpoint", "checkpoints", "tokenizer"})
LEFT_OUT_ENDINGS = (
    ".pt", ".pth", ".bin", ".distcp", ".safetensors", ".partial", ".lock", "_trace.json.gz", "_snapshot.pickle"
)  # fmt: skip


def main(args: list[str]) -> int:
    """Pack one output directory. Exit code 0, or 2 for a mistake of the user."""
    parser = argparse.ArgumentParser(prog="python -m ablation pack", description=__doc__)
    parser.add_argument("directory", type=Path, metavar="DIR", help="an ablation's output directory")
    parser.add_argument("--to", type=Path, help="folder of the two files (default: beside DIR)")
    parser.add_argument("--overwrite", action="store_true", help="replace files of an earlier pack")
    given = parser.parse_args(args)
    try:
        page, archive, left_out = pack(given.directory, given.to, overwrite=given.overwrite)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{page}  {page.stat().st_size / 2**20:.1f} MiB")
    print(f"{archive}  {archive.stat().st_size / 2**20:.1f} MiB, without {left_out} checkpoints, traces and locks")
    return 0


def pack(directory: Path, to: Path | None = None, *, overwrite: bool = False) -> tuple[Path, Path, int]:
    """Make the report anew and write both files; returns their paths and the number of files left out.

    Raises:
        ConfigError: no runs in ``directory``, or a file is there already and ``overwrite`` is false.
    """
    result, folder = compare_directories([directory])
    place = to or Path(os.path.relpath(directory.resolve().parent))
    stem = directory.resolve().name
    page, archive = place / f"{stem}-report.html", place / f"{stem}.tar.gz"
    for path in (page, archive):
        if path.exists() and not overwrite:
            raise ConfigError(f"{path}: there already; choose another folder with --to, or replace it with --overwrite")
    place.mkdir(parents=True, exist_ok=True)
    write_report(result, folder)
    page.write_bytes((folder / "report.html").read_bytes())
    kept = list(_kept(directory))
    partial = archive.with_name(f".{archive.name}.partial")
    with tarfile.open(partial, "w:gz") as tar:
        for path in kept:
            tar.add(path, arcname=f"{stem}/{path.relative_to(directory)}", recursive=False, filter=_anonymous)
    os.replace(partial, archive)
    everything = sum(len(files) for _, _, files in os.walk(directory))
    return page, archive, everything - len(kept)


def _kept(directory: Path) -> Iterator[Path]:
    """Regular files worth sending, in a fixed order. Links are not followed: what they point to is elsewhere."""
    for folder, children, files in os.walk(directory):
        children[:] = sorted(name for name in children if name not in LEFT_OUT_FOLDERS)
        for name in sorted(files):
            path = Path(folder) / name
            if path.is_file() and not path.is_symlink() and not name.endswith(LEFT_OUT_ENDINGS):
                yield path


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Without the packer's user and group."""
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member
