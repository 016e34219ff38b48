"""Folders of pictures or sounds to listings; hidden and system files are ignored.

ROOT/CLASS/FILE                    a folder for each class
ROOT/train/CLASS/FILE              the same with parts; val and test beside train
ROOT/FILE                          without labels
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..protocol.preparation import Targets
from .errors import BadOption, DataError
from .media import Listing, Medium, counted, medium_of, read_listing, take
from .options import ReadOptions, Wanted
from .samples import Kind, Raw, plural, some

USES = ("train", "val", "test")

_JUNK = frozenset(("thumbs.db", "desktop.ini", "__macosx", "__pycache__"))

_WANTED = "give a folder for each class, as in {0}/CLASS/FILE, or {0}/train/CLASS/FILE with val and test beside train"

_UNUSED = ("label", "drop", "missing", "decimal", "delimiter", "encoding", "axes", "skip", "categories", "time")


@dataclass(frozen=True)
class _File:
    path: Path
    medium: Medium
    use: str
    label: str


def read_folder(root: Path, options: ReadOptions, wanted: Wanted) -> dict[str, Raw]:
    """Return a folder's samples by use. All parts have the same shape, free axes and remarks."""
    options.refuse(str(root), "is a folder", *_UNUSED)
    said: list[str] = []
    found = _found(root, wanted.labelled, said)
    medium = _medium(root, found)
    names = [file.label for file in found]
    labels = None
    if wanted.labelled:
        _check_classes(root, options, wanted.targets, names)
        labels = np.array(names, np.str_)
    paths = tuple(file.path for file in found)
    kind: Kind | None = "classes" if wanted.labelled else None
    listing = Listing(str(root), medium, paths, labels, kind, said=tuple(said))
    raw, places = read_listing(listing, options, wanted.preparation)
    uses = np.array([file.use for file in found], np.str_)[places]
    parts = {use: np.flatnonzero(uses == use) for use in ("", *USES)}
    return {use: take(raw, chosen) for use, chosen in parts.items() if len(chosen)}


def read_single(path: Path, medium: Medium, options: ReadOptions, wanted: Wanted) -> Raw:
    """Return one picture or sound as an unlabelled sample. Raises DataError if it cannot be read."""
    if wanted.labelled:
        raise DataError(
            f"{path}: is one {medium} without a class; give its parent folder, with a folder for each class, or a "
            "table with the columns file and label"
        )
    options.refuse(str(path), f"is a {medium}", *_UNUSED)
    return read_listing(Listing(str(path), medium, (path,)), options, wanted.preparation)[0]


def _found(root: Path, labelled: bool, said: list[str]) -> list[_File]:
    folders, files = _entries(root)
    if not folders and (files or not labelled):
        return _flat(root, files, labelled, said)
    found: list[_File] = []
    ignored: list[Path] = []
    beside = list(files)
    nested: list[Path] = []
    empty: list[str] = []
    for use, above in _parts(root, folders, labelled).items():
        classes = folders
        if above != root:
            classes, others = _entries(above)
            beside += others
        for folder in classes:
            inner, own = _entries(folder)
            used, others = _media(own, use, folder.name)
            found += used
            ignored += others
            nested += inner
            if not used:
                empty.append(str(folder.relative_to(root)))
    if not found:
        raise DataError(_no_media(root, folders, [*ignored, *beside], nested))
    if beside:
        were = "was" if len(beside) == 1 else "were"
        said.append(f"{plural(len(beside), 'file')} beside the folders of classes {were} left out: {counted(beside)}")
    if ignored:
        were = "is not a picture or sound and was" if len(ignored) == 1 else "are not pictures or sounds and were"
        said.append(f"{plural(len(ignored), 'file')} {were} left out: {counted(ignored)}")
    if nested:
        said.append(f"{plural(len(nested), 'folder')} within folders of classes left out: {some(nested, 3)}")
    if empty:
        said.append(f"folders without readable files, not used as classes: {some(empty)}")
    return found


def _media(paths: list[Path], use: str, label: str) -> tuple[list[_File], list[Path]]:
    """Return the pictures and sounds among these files, and the others."""
    media = {path: medium_of(path) for path in paths}
    found = [_File(path, medium, use, label) for path, medium in media.items() if medium is not None]
    return found, [path for path, medium in media.items() if medium is None]


def _flat(root: Path, files: list[Path], labelled: bool, said: list[str]) -> list[_File]:
    found, ignored = _media(files, "", "")
    if not found:
        raise DataError(_no_media(root, [], files, []))
    if labelled:
        raise DataError(
            f"{root}: holds {plural(len(found), 'file')} and no folders; {_WANTED.format(root)}; or give a table that "
            "lists the files, with the columns file and label"
        )
    if ignored:
        said.append(f"{plural(len(ignored), 'file')} left out: {counted(ignored)}")
    return found


def _no_media(root: Path, folders: list[Path], files: list[Path], nested: list[Path]) -> str:
    if nested:
        return f"{root}: {folders[0].name} holds only folders, such as {nested[0].name}; {_WANTED.format(root)}"
    held = [plural(len(folders), "folder")] if folders else []
    held += [counted(files)] if files else []
    return f"{root}: holds no picture and no sound ({' and '.join(held) or 'it is empty'}); {_WANTED.format(root)}"


def _entries(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return folders and files by name, without hidden and system files."""
    try:
        shown = sorted(
            (path for path in folder.iterdir() if not path.name.startswith(".") and path.name.lower() not in _JUNK),
            key=lambda path: path.name,
        )
    except OSError as error:
        raise DataError(f"{folder}: cannot be read ({error.strerror or error}); check its permissions") from None
    folders = [path for path in shown if path.is_dir()]
    return folders, [path for path in shown if not path.is_dir()]


def _parts(root: Path, folders: list[Path], labelled: bool) -> dict[str, Path]:
    """Return the parent folders of class folders: use -> folder. Raises DataError."""
    uses = {folder.name.lower(): folder for folder in folders if folder.name.lower() in USES and _entries(folder)[0]}
    if not uses:
        return {"": root}
    others = [folder.name for folder in folders if folder not in uses.values()]
    if others:
        raise DataError(
            f"{root}: {some(uses.values())} holds folders of classes, but {some(others)} is beside it; name parts "
            "train, val and test: rename or remove it"
        )
    if "train" not in uses and labelled:
        raise DataError(f"{root}: has {some(uses)}, but no train; add it, or rename one of them")
    return {use: uses[use] for use in USES if use in uses}


def _medium(root: Path, found: list[_File]) -> Medium:
    counts = Counter(file.medium for file in found)
    if len(counts) > 1:
        examples = [
            f"{plural(count, medium)}, such as {next(f.path.relative_to(root) for f in found if f.medium == medium)}"
            for medium, count in sorted(counts.items())
        ]
        raise DataError(f"{root}: holds {' and '.join(examples)}; put them into separate folders")
    return found[0].medium


def _check_classes(root: Path, options: ReadOptions, targets: Targets | None, names: list[str]) -> None:
    advice = "list the files in a table with the columns file and label"
    if targets is not None and targets.kind == "numbers":
        raise DataError(f"{root}: folders name classes, but the federation predicts numbers; {advice}")
    if options.target == "number":
        raise BadOption(f"{root}: target=number, but folders name classes; leave it out, or {advice}")
    long = next((name for name in names if len(name) > 200), None)
    if long is not None:
        raise DataError(f"{root}: the folder {long[:40]}... has {len(long)} characters; use at most 200")
