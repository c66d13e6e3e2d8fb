"""Lay out a base directory for a server: the pack as users install it, and what tests add."""

from __future__ import annotations

import shutil
from pathlib import Path

PACK = Path(__file__).resolve().parents[2]
PACK_NAME = "warmgraph"
#: One-file packs by which a host takes narrow models.
NARROW = ("narrow_arch.py", "narrow_transformers.py", "narrow_audio_video.py")


def shipped_entries(pack: Path = PACK) -> list[Path]:
    """Return the top-level entries that a user gets: neither hidden nor in .comfyignore."""
    lines = (pack / ".comfyignore").read_text(encoding="utf-8").split()
    ignored = {line.strip("/") for line in lines}
    return sorted(
        entry
        for entry in pack.iterdir()
        if entry.name not in ignored and not entry.name.startswith((".", "__pycache__"))
    )


def install_pack(base: Path, pack: Path = PACK) -> Path:
    """Copy the pack into `base`/custom_nodes, as an archive from the registry leaves it there."""
    target = base / "custom_nodes" / PACK_NAME
    if target.exists():
        shutil.rmtree(target)
    target.mkdir(parents=True)
    skip = shutil.ignore_patterns("__pycache__", "*.pyc")
    for entry in shipped_entries(pack):
        if entry.is_dir():
            shutil.copytree(entry, target / entry.name, ignore=skip)
        else:
            shutil.copy2(entry, target / entry.name)
    return target


def prepare_base(base: Path, tree: Path, *, pack: bool = True, narrow: bool = True) -> Path:
    """Make a base directory: folders, the host's example picture, the pack, narrow models."""
    for name in ("custom_nodes", "models", "input", "output", "user"):
        (base / name).mkdir(parents=True, exist_ok=True)
    shutil.copy2(tree / "input" / "example.png", base / "input" / "example.png")
    if pack:
        install_pack(base)
    if narrow:
        for name in NARROW:
            shutil.copy2(PACK / "dev" / "tools" / name, base / "custom_nodes" / name)
    return base
