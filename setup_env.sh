#!/usr/bin/env bash
# Print the path of a Python that has what this checkout needs: the active one if it has, else .venv, made on first use
# from constraints.txt. Messages go to stderr. After the first time nothing is downloaded.
#
#   python="$(./setup_env.sh)"          # to train
#   python="$(./setup_env.sh dev)"      # to test and lint as well
#   python="$(./setup_env.sh dev DIR)"  # in DIR, whatever the active environment has
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)"
extras="${1:-}"
venv="${2:-$root/.venv}"
[[ "$venv" == /* ]] || venv="$PWD/$venv"

say() { printf '%s\n' "$*" >&2; }

# Exit code 0 if that Python has every dependency of pyproject.toml in a version that it allows, else one line that says why not.
satisfied() {
    "$1" -I - "$root/pyproject.toml" "$2" <<'PY'
import re, sys
if not sys.version_info >= (3, 11):
    sys.exit("Python %d.%d is older than 3.11" % sys.version_info[:2])
import tomllib
from importlib.metadata import PackageNotFoundError, version

def numbers(text):
    found = [int(n) for n in re.findall(r"\d+", re.split(r"[+a-z]", text)[0])]
    return tuple(found + [0] * (4 - len(found)))

compare = {">=": lambda a, b: a >= b, "<": lambda a, b: a < b, "==": lambda a, b: a == b}
project = tomllib.load(open(sys.argv[1], "rb"))["project"]
groups = [project["dependencies"]] + [project["optional-dependencies"][e] for e in ("dev", "report") if sys.argv[2]]
for requirement in (r for group in groups for r in group):
    requirement, _, marker = requirement.partition(";")
    if "linux" in marker and sys.platform != "linux":
        continue
    name, rules = re.match(r"([\w.-]+)(.*)", requirement).groups()
    try:
        installed = version(name)
    except PackageNotFoundError:
        sys.exit(name + " is not installed")
    for operator, bound in re.findall(r"(>=|<|==)([^,\s]+)", rules):
        if not compare[operator](numbers(installed), numbers(bound)):
            sys.exit("%s %s is installed, %s is needed" % (name, installed, rules.strip()))
PY
}

if [[ $# -lt 2 ]]; then
    for name in python python3; do
        candidate="$(command -v "$name" || true)"
        if [[ -n "$candidate" ]] && satisfied "$candidate" "$extras" 2>/dev/null; then
            echo "$candidate"
            exit
        fi
    done
fi
if [[ -x "$venv/bin/python" ]] && satisfied "$venv/bin/python" "$extras" 2>/dev/null; then
    echo "$venv/bin/python"
    exit
fi

# The lock file was resolved on 3.11, so that comes first. A name on PATH may be a shim without a Python behind it: try each.
base="" incomplete=""
for name in python3.11 python3.12 python3.13 python3.14 python3 python; do
    "$name" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' >/dev/null 2>&1 || continue
    if "$name" -c 'import venv, ensurepip' >/dev/null 2>&1; then
        base="$(command -v "$name")"
        break
    fi
    incomplete="$(command -v "$name")"
done
if [[ -z "$base" ]]; then
    if [[ -n "$incomplete" ]]; then
        say "setup_env.sh: $incomplete cannot make a virtual environment: its modules venv and ensurepip are missing."
        say "Debian and Ubuntu have them in a package of their own: apt-get install python3-venv"
    else
        say "setup_env.sh: no Python 3.11 to 3.14 on PATH. Debian and Ubuntu: apt-get install python3 python3-venv"
    fi
    exit 2
fi

say "Setting up $venv with $("$base" -V), once. With the CPU build of torch: 0.7 GB to download, 2.4 GB on disk, one to"
say "three minutes. Where the package index has only the CUDA build: several GB more. Progress: $venv/setup.log"
mkdir -p "$venv"
if command -v flock >/dev/null; then # two launches at once: the second waits for the first
    exec 9>"$venv/setup.lock"
    flock 9
    if [[ -x "$venv/bin/python" ]] && satisfied "$venv/bin/python" "$extras" 2>/dev/null; then
        echo "$venv/bin/python"
        exit
    fi
fi
started=$SECONDS
if ! {
    "$base" -m venv "$venv" &&
        "$venv/bin/python" -m pip install --disable-pip-version-check -c "$root/constraints.txt" -e "$root[dev,report]"
} >"$venv/setup.log" 2>&1; then
    tail -n 15 "$venv/setup.log" >&2
    say "setup_env.sh: installing the dependencies failed, see above and $venv/setup.log. Run this again to go on where it stopped."
    exit 1
fi
if ! satisfied "$venv/bin/python" dev; then
    say "setup_env.sh: constraints.txt does not give what pyproject.toml asks for, see above."
    exit 1
fi
say "Ready after $((SECONDS - started)) s."
echo "$venv/bin/python"
