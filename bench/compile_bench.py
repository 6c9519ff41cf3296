#!/usr/bin/env python3
"""What including leanopt costs a build: user seconds to compile a file that uses the five
optimizers, over those of a file that only includes torch/torch.h. Compiler and flags are those of
the build whose compile_commands.json is given; only the level of optimisation is varied. The two
are compiled in turn and the minimum of several rounds counts, because other programs slow the
compiler down but never speed it up."""

import argparse
import json
import os
import pathlib
import shlex
import subprocess
import tempfile

BASE, OURS = "torch_only.cpp", "five_optimizers.cpp"


def commands(database):
    """The command of each of the two files, as a list of words without its output."""
    found = {}
    for entry in json.loads(database.read_text()):
        name = pathlib.Path(entry["file"]).name
        if name not in (BASE, OURS):
            continue
        words = entry.get("arguments") or shlex.split(entry["command"])
        output = words.index("-o")
        found[name] = (entry["directory"], words[:output] + words[output + 2 :])
    missing = {BASE, OURS} - found.keys()
    if missing:
        raise SystemExit(f"{database}: no command for {', '.join(sorted(missing))}")
    return found


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
    print(f"{'level':5}  {'torch/torch.h':>13}  {'five optimizers':>15}  {'ratio':>5}")
    with tempfile.TemporaryDirectory() as folder:
        for level in options.levels.split(","):
            best = dict.fromkeys((BASE, OURS), float("inf"))
            for _ in range(options.rounds):
                for name in best:
                    seconds = user_seconds(*found[name], level, os.path.join(folder, "object.o"))
                    best[name] = min(best[name], seconds)
            ratio = best[OURS] / best[BASE]
            print(f"{level:5}  {best[BASE]:11.2f} s  {best[OURS]:13.2f} s  {ratio:5.2f}", flush=True)


if __name__ == "__main__":
    main()
