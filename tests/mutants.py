"""One-token changes of rules, formats, weights and engines, each of which the tests must notice.

    python3 tests/mutants.py [--jobs N] [--only TEXT] [--keep]

Copies the headers, changes one, compiles the test programs named with it against the copy and runs
them: a mutant lives if all of them pass. Takes about a minute a mutant; run by hand (README).
Exit status: the number of mutants that live or could not be made.
"""
import argparse
import concurrent.futures
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
CXX = os.environ.get("CXX", "g++")

# file below include/leanopt, what stands there (once), what takes its place, the programs that see it
MUTANTS = [
    ("rules/adam.hpp", "T(1 - beta1)", "T(1 - beta2)", ["rules/adam_test"]),
    ("rules/adam.hpp", "std::fma(-o.lr(), o.weight_decay(), 1.0)", "std::fma(o.lr(), o.weight_decay(), 1.0)",
     ["rules/adam_test"]),
    ("rules/adafactor.hpp", "ratio < 1 ? 1 : ratio", "ratio > 1 ? 1 : ratio", ["rules/adafactor_test"]),
    ("core/random.hpp", "stream % 2 ? z >> 32 : z", "stream % 2 ? z : z", ["core/random_test"]),
    ("core/number.hpp", "(random >> (32 - dropped))", "(random >> (33 - dropped))", ["weights/*"]),
    ("formats/log8.hpp", "std::uint32_t(base + 5)", "std::uint32_t(base + 1)", ["formats/log8_test"]),
    ("formats/log8.hpp", "spread <= 7u << 23", "spread <= 8u << 23", ["formats/log8_test"]),
    ("formats/log8.hpp", "return max(magnitude, min(bits(x), I(1u)));", "return magnitude;", ["formats/log8_test"]),
    ("formats/log8.hpp", "dither = random >> (32 - s.shift);", "dither = random >> (31 - s.shift);",
     ["formats/log8_test"]),
    ("formats/dynamic8.hpp", "std::uint32_t(c % 2)", "0u", ["formats/dynamic8_test"]),
    ("formats/dynamic8.hpp", "Strict ? ~0u : 0", "~0u", ["formats/dynamic8_test"]),
    ("formats/dynamic8.hpp", "Range == values::any ? sign : Strict", "Range == values::any ? ~0u : Strict",
     ["formats/dynamic8_test"]),
    ("formats/dynamic8.hpp", "s.least >= real(book::small)", "s.least > 0", ["formats/dynamic8_test"]),
    ("formats/bfloat16.hpp", "min(bits(x), I(1u))", "I(0u)", ["formats/bfloat16_test", "conformance/formats_test"]),
    ("weights/split.hpp", "(kept + I(1u << (Bits - 1))) >> Bits", "kept >> Bits", ["weights/*"]),
    ("weights/split.hpp", "if_above(sum, I(0x7fffffffu), I(0u), sum)", "sum", ["weights/*"]),
    ("engine/cpu/numbers.hpp", "draw(word, first + std::uint32_t(begin))", "draw(word, first)", ["weights/*", "conformance/pairs_test"]),
    ("engine/cpu/elementwise.hpp", "if (next.x.kept[j]) moment", "if (!next.x.kept[j]) moment", ["conformance/pairs_test"]),
    ("engine/cpu/elementwise.hpp", "std::copy_n(last_p, t.elements % B, last_to);", "std::copy_n(last_p, t.elements % B - 1, last_to);", ["conformance/pairs_test"]),
    ("engine/cpu/operands.hpp", "(g + i, n) * V(factor)", "(g + i, n)", ["conformance/pairs_test"]),
    ("engine/cpu/elementwise.hpp", "x.template multiply<lanes_of<Width, T>>(B, multiplied);", "",
     ["conformance/pairs_test"]),
    ("engine/cpu/elementwise.hpp", "if (!large[j]) r[k]", "r[k]", ["formats/log8_test"]),
    ("engine/cpu/elementwise.hpp", "next->block = (t.first + i) / B;", "next->block = i / B;",
     ["conformance/pairs_test"]),
    ("engine/cuda/pack.cuh", "for (int d = Threads / 2; d; d /= 2) x =",
     "for (int d = Threads / 4; d; d /= 2) x =", ["engine/cuda/norm_test"]),
    ("engine/cuda/memory.cuh", "  __syncwarp();\n  load_quads<Width>(copy, w);",
     "  load_quads<Width>(copy, w);", ["engine/cuda/lists_test"]),
    ("engine/cuda/elementwise.cuh", "if (skips) set_where(bad, p, p_.load_each(e));",
     "", ["engine/cuda/lists_test"]),
    ("engine/cuda/elementwise.cuh", "block + lane_of_thread() / streams",
     "block", ["engine/cuda/lists_test"]),
    ("engine/cuda/elementwise.cuh", "w % warps_of_unit * stages_of_warp",
     "w % warps_of_unit", ["engine/cuda/lists_test"]),
    ("engine/cuda/elementwise.cuh", "if (is_called_off(scalars)) return;",
     "", ["engine/cuda/lists_test"]),
    ("engine/cuda/sums.cuh", "at < begin + unit && at < t.elements",
     "at < begin + unit / 2 && at < t.elements", ["engine/cuda/norm_test"]),
    ("engine/cuda/sums.cuh", "  __syncthreads();\n  if (threadIdx.x != 0) return;",
     "  if (threadIdx.x != 0) return;", ["engine/cuda/norm_test"]),
    ("engine/cuda/adafactor.cuh", "return t.skipped && has_infinite_square<T>(g) ? T(0) : g;",
     "return g;", ["engine/cuda/adafactor_test"]),
    ("engine/cuda/adafactor.cuh", "__shfl_sync(all_lanes, total, half_threads)",
     "0", ["engine/cuda/adafactor_test"]),
    ("engine/cuda/adafactor.cuh", "  if (by_block)\n    __syncthreads();\n  else\n    __syncwarp();",
     "  __syncwarp();", ["engine/cuda/adafactor_test"]),
    ("engine/cuda/roots.cuh", "x > least_ ? x : least_",
     "x", ["engine/cuda/roots_test"]),
    ("engine/cuda/list.cuh", "all[middle].*first <= u",
     "all[middle].*first < u", ["engine/cuda/lists_test"]),
]


def sources(pattern):
    found = sorted((ROOT / "tests").glob(pattern + ("_test.cpp" if pattern.endswith("*") else ".cpp")))
    if not found:
        raise SystemExit(f"no test matches {pattern}")
    return found


def build_and_run(include, source, where):
    """None if the program passes, else how it failed."""
    program = where / source.stem
    command = [CXX, "-std=c++17", "-O1", f"-I{include}", f"-I{ROOT}", f'-DLEANOPT_TEST_DATA="{ROOT}/tests/data"',
               str(source), "-o", str(program), "-lgtest", "-lgtest_main", "-pthread"]
    compiled = subprocess.run(command, capture_output=True, text=True)
    if compiled.returncode:
        return "does not compile:\n" + compiled.stderr[:2000]
    try:
        ran = subprocess.run([str(program)], capture_output=True, text=True, timeout=900)
    except subprocess.TimeoutExpired:
        return "hangs"
    finally:
        program.unlink()
    if ran.returncode == 0:
        return None
    failed = [line for line in ran.stdout.splitlines() if line.startswith("[  FAILED  ]") and " (" in line]
    return failed[0] if failed else f"exit status {ran.returncode}"


def try_mutant(mutant):
    file, old, new, programs = mutant
    with tempfile.TemporaryDirectory() as folder:
        where = pathlib.Path(folder)
        shutil.copytree(ROOT / "include", where / "include")
        target = where / "include" / "leanopt" / file
        text = target.read_text()
        if text.count(old) != 1:
            return "stale", f"stands {text.count(old)} times there"
        target.write_text(text.replace(old, new))
        for pattern in programs:
            for source in sources(pattern):
                failure = build_and_run(where / "include", source, where)
                if failure and failure.startswith("does not compile"):
                    return "stale", failure
                if failure:
                    return "killed", f"{source.stem}: {failure}"
    return "lives", "all pass: " + ", ".join(programs)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default="", help="mutants whose file or text contains this")
    arguments = parser.parse_args()
    chosen = [m for m in MUTANTS if arguments.only in m[0] + m[1]]
    bad = 0
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        for mutant, (verdict, why) in zip(chosen, pool.map(try_mutant, chosen)):
            bad += verdict != "killed"
            print(f"{verdict:7} {mutant[0]}: {mutant[1]}  ->  {mutant[2]}\n        {why}", flush=True)
    print(f"{len(chosen) - bad} of {len(chosen)} mutants killed")
    return bad


if __name__ == "__main__":
    sys.exit(main())
