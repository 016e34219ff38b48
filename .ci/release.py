"""Build a release in dist/ after checks: source archive, wheel and notes. Used by `make release`.

It publishes nothing, and ends with the commands that would.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
SECTION = re.compile(r"^## (?P<version>\S+), (?P<date>.+)$", re.MULTILINE)


def run(*command: object) -> str:
    """Run a command in the repository and return its output. Raises SystemExit with its output if it fails."""
    environment = {**os.environ, "SPARROW_RELEASE": "1"}
    # An installation in another environment must not find this checkout.
    environment.pop("PYTHONPATH", None)
    arguments = [str(part) for part in command]
    done = subprocess.run(arguments, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(arguments)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout.strip()


def notes() -> tuple[str, str]:
    """Return the version and the text of the newest section of the changelog."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    sections = list(SECTION.finditer(text))
    if not sections:
        sys.exit("CHANGELOG.md has no section like `## 0.1.0, 2027-01-31`; write one")
    newest = sections[0]
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", newest["date"]):
        sys.exit(f"CHANGELOG.md: version {newest['version']} is {newest['date']}; write the date instead")
    end = sections[1].start() if len(sections) > 1 else len(text)
    return newest["version"], text[newest.end() : end].strip()


def main() -> None:
    """Check, build and test the release, and print the next commands."""
    if run("git", "status", "--porcelain"):
        sys.exit("there are changes that no commit has; commit them, or release from a fresh clone")
    version, text = notes()
    shutil.rmtree(DIST, ignore_errors=True)
    run(sys.executable, "-m", "build", "--outdir", DIST, ".")
    built = sorted(DIST.iterdir())
    names = [f"sparrow_fl-{version}-py3-none-any.whl", f"sparrow_fl-{version}.tar.gz"]
    if [path.name for path in built] != names:
        sys.exit(f"built {', '.join(path.name for path in built)}, but CHANGELOG.md says {version}; setup.py has BASE")
    run(sys.executable, "-m", "twine", "check", "--strict", *built)
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = Path(folder) / "bin" / "python"
        run(python, "-m", "pip", "install", "--quiet", f"{built[0]}[coordinator,device]")
        said = run(python, "-m", "sparrow", "--version")
        if version not in said.split():
            sys.exit(f"the installed wheel says {said}")
        run(python, "-c", "import coordinator.main, edge_sdk.join, sparrow.export.build")
    (DIST / "NOTES.md").write_text(f"{text}\n", encoding="utf-8")
    print(f"dist/ has {', '.join(names)} and NOTES.md. Next:")
    print(f"  git tag -s v{version} -F dist/NOTES.md && git push origin v{version}")
    print(f"  python -m twine upload {' '.join(f'dist/{name}' for name in names)}")


if __name__ == "__main__":
    main()
