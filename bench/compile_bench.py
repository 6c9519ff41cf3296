#!/usr/bin/env python3
"""What including leanopt costs a build: user seconds to compile a file that uses all its classes,
with the headers alone and with leanopt::compiled, over those of a file that only includes
torch/torch.h; and, for comparison, of one that uses LibTorch's own AdamW. Compiler and flags are
those of the build whose compile_commands.json is given; only the level of optimisation is varied.
All are compiled in turn and the minimum of several rounds counts, because other programs slow the
compiler down but never speed it up."""

import argparse
import json
import os
import pathlib
import shlex
import subprocess
import tempfile

BASE = "torch/torch.h"
FILES = {BASE: "torch_only.cpp", "torch::optim": "torch_adamw.cpp"}
OURS = "optimizers.cpp"
HEADERS, COMPILED = "headers", "compiled"


def commands(database):
    """The command of each column, as a folder and a list of words without its output."""
    found = {}
    for entry in json.loads(database.read_text()):
        path = pathlib.Path(entry["file"])
        if path.parent.name != "compile":
            continue
        words = entry.get("arguments") or shlex.split(entry["command"])
        columns = [column for column, name in FILES.items() if name == path.name]
        if path.name == OURS:
            columns = [COMPILED if "-DLEANOPT_COMPILED" in words else HEADERS]
        output = words.index("-o")
        for column in columns:
            found[column] = (entry["directory"], words[:output] + words[output + 2 :])
    wanted = [*FILES, HEADERS, COMPILED]
    missing = [column for column in wanted if column not in found]
    if missing:
        raise SystemExit(f"{database}: no command for {', '.join(missing)}")
    return {column: found[column] for column in wanted}


def user_seconds(directory, words, level, output):
    """Of one compilation. The last -O on a command line wins."""
    child = subprocess.Popen([*words, level, "-o", output], cwd=directory)
    _, status, usage = os.wait4(child.pid, 0)
    if os.waitstatus_to_exitcode(status):
        raise SystemExit("the compiler failed: " + shlex.join(words))
    return usage.ru_utime


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("database", type=pathlib.Path, help="the build's compile_commands.json")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--levels", default="-O0,-O2", help="levels of optimisation to try")
    options = parser.parse_args()

    found = commands(options.database)
    print(f"load {os.getloadavg()[0]:.1f}, minimum of {options.rounds} interleaved rounds")
    print("level" + "".join(f"{column:>18}" for column in found))
    with tempfile.TemporaryDirectory() as folder:
        for level in options.levels.split(","):
            best = dict.fromkeys(found, float("inf"))
            for _ in range(options.rounds):
                for column in best:
                    seconds = user_seconds(*found[column], level, os.path.join(folder, "object.o"))
                    best[column] = min(best[column], seconds)
            cells = (f"{seconds:8.2f} s {seconds / best[BASE]:6.2f}" for seconds in best.values())
            print(f"{level:5}" + "".join(f"{cell:>18}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
