"""Shows that installing kvsteward moves nothing that an environment has: only additions are allowed.

    python scripts/check_pins.py ENVIRONMENT_PYTHON [EXTRA ...]

Asks that environment's pip for a dry run of this checkout with the extras (default: valkey) and compares its report
with what is installed. Prints what would be added; exits with 1 and the list where a version would move. Installs
nothing.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def installed(python: str) -> dict[str, str]:
    """Versions by normalised name."""
    listed = subprocess.run(
        [python, "-m", "pip", "list", "--format", "json"], check=True, capture_output=True, text=True
    )
    return {normal(package["name"]): package["version"] for package in json.loads(listed.stdout)}


def normal(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def wanted(python: str, requirement: str) -> dict[str, str]:
    """What pip would install for the requirement."""
    command = [python, "-m", "pip", "install", "--dry-run", "--quiet", "--report", "-", requirement]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"pip cannot install {requirement}:\n{done.stderr[-3000:]}")
    report: dict[str, Any] = json.loads(done.stdout)
    return {normal(item["metadata"]["name"]): item["metadata"]["version"] for item in report["install"]}


def compare(before: dict[str, str], plan: dict[str, str]) -> tuple[dict[str, str], dict[str, tuple[str, str]]]:
    """What is added, and what would move from which version to which; kvsteward itself may."""
    added = {name: version for name, version in plan.items() if name not in before and name != "kvsteward"}
    moved = {
        name: (before[name], version)
        for name, version in plan.items()
        if name in before and before[name] != version and name != "kvsteward"
    }
    return added, moved


def main(arguments: list[str]) -> int:
    if not arguments:
        print((__doc__ or "").strip())
        return 2
    python, extras = arguments[0], arguments[1:] or ["valkey"]
    before = installed(python)
    added, moved = compare(before, wanted(python, f"{ROOT}[{','.join(extras)}]"))
    print(f"{len(before)} packages are installed; kvsteward[{','.join(extras)}] adds {len(added)}:")
    for name, version in sorted(added.items()):
        print(f"  {name} {version}")
    for name, (old, new) in sorted(moved.items()):
        print(f"MOVED {name} {old} -> {new}")
    print("no installed version moves" if not moved else f"{len(moved)} installed versions would move")
    return 1 if moved else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
