"""What nvcc makes of the CUDA engine, checked without a device.

    python3 tests/engine/cuda/gates.py [--nvcc NVCC] [--arch 80,90] [--jobs N] [--source FILE]

Compiles cmake/leanopt_cuda.cu for every architecture that nvcc knows, with warnings as errors. No
kernel may spill, have a stack, take more registers or shared memory than stated, or use an
approximate operation but the two seeds of engine/cuda/roots.cuh. Of the steps of Adam it counts the
instructions that an aligned block of float32 parameters takes from its first load to its last
store, by the shortest way through the machine code that has all loads, stores and seeds and no call.
Exit status: how many checks failed.
"""
import argparse
import concurrent.futures
import heapq
import pathlib
import re
import shutil
import struct
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[3]
REGISTERS = {"float": 128, "double": 255}
SHARED = 48 << 10
SEEDS = {"rcp.approx.ftz.f32", "rsqrt.approx.ftz.f32"}

# Instructions per parameter: what was measured and five in a hundred more.
LIMITS = {
    "full": {80: 36.1, 90: 32.7, 100: 32.1},
    "log8": {80: 79.2, 90: 74.8, 100: 75.1},
    "dynamic8": {80: 74.1, 90: 71.5, 100: 74.4},
}
# The loads and stores of eight parameters, by kind and bits, their seeds, and the tests of div.rn:
# none, but for the header of each slot of dynamic8.
ACCESSES = {
    "full": {("load", 128): 8, ("store", 128): 6, ("seed", 0): 16, ("test", 0): 0},
    "log8": {("load", 128): 4, ("load", 32): 4, ("store", 128): 2, ("store", 32): 4, ("seed", 0): 16, ("test", 0): 0},
    "dynamic8": {("load", 128): 4, ("load", 32): 6, ("store", 128): 2, ("store", 32): 6, ("seed", 0): 18, ("test", 0): 2},
}
KERNELS = {
    "full": "adam_formulaILb0EEENS_7formats4fullEfEE",
    "log8": "adam_formulaILb0EEENS_7formats11log8_blocksILi256EEEfEE",
    "dynamic8": "adam_formulaILb0EEENS_7formats15dynamic8_blocksILi256ELb0EEEfEE",
}

# Opcodes, the lowest 12 bits of an instruction of 128.
BRANCH, UNIFORM_BRANCH, EXIT, CALL, RETURN, TEST = 0x947, 0x547, 0x94D, 0x944, 0x950, 0x302
LOAD, STORE, SEED = 0x981, 0x986, (0x308, 0x908)
WIDTHS = {0: 8, 1: 8, 2: 16, 3: 16, 4: 32, 5: 64, 6: 128, 7: 256}


def kernels_of(cubin):
    """Name and code of the kernels of a cubin, an ELF file with a section for each."""
    data = pathlib.Path(cubin).read_bytes()
    offset, = struct.unpack_from("<Q", data, 40)
    count, strings = struct.unpack_from("<HH", data, 60)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, offset + 64 * i) for i in range(count)]
    names = sections[strings][4]
    for section in sections:
        begin = names + section[0]
        name = data[begin : data.index(b"\0", begin)].decode()
        if name.startswith(".text."):
            yield name[6:], data[section[4] : section[4] + section[5]]


class Code:
    """The instructions of a kernel: what each is and which follow."""

    def __init__(self, code, arch):
        self.kinds, self.next = [], []
        words = [struct.unpack_from("<QQ", code, i) for i in range(0, len(code), 16)]
        for k, (low, high) in enumerate(words):
            opcode = low & 0xFFF
            conditional = (low >> 12) & 7 != 7
            follows = [k + 1]
            if opcode in (BRANCH, UNIFORM_BRANCH):
                conditional |= opcode == UNIFORM_BRANCH or (high >> 23) & 7 != 7
                follows = [k + 1 + self.distance(low, high, arch)] + [k + 1] * conditional
            elif opcode in (EXIT, RETURN):
                follows = [k + 1] * conditional
            elif opcode == CALL:
                follows = []  # a slow way
            self.next.append([n for n in follows if 0 <= n < len(words)])
            bits = WIDTHS[(high >> 9) & 7]
            self.kinds.append(("load", bits) if opcode == LOAD else ("store", bits) if opcode == STORE
                              else ("seed", 0) if opcode in SEED else ("test", 0) if opcode == TEST else None)

    @staticmethod
    def distance(low, high, arch):
        """Of a branch's target from what follows it, in instructions."""
        far = (low >> 34) | (high & 0x3FFFF) << 30
        if far >> 47:
            far -= 1 << 48
        units = far << 8 | (low >> 16) & 0xFF if arch >= 90 else far  # of 4 bytes
        return units * 4 // 16

    def shortest(self, accesses):
        """Instructions from the first wide load to the last store on the shortest way with exactly
        these accesses."""
        kinds = sorted(accesses)
        goal = tuple(accesses[k] for k in kinds)
        first = kinds.index(("load", 128))
        best = None
        for start, kind in enumerate(self.kinds):
            if kind != ("load", 128):
                continue
            state = (start, tuple(int(i == first) for i in range(len(kinds))))
            costs, queue = {state: 1}, [(1, state)]
            while queue:
                cost, state = heapq.heappop(queue)
                if cost > costs[state] or best is not None and cost >= best:
                    continue
                at, seen = state
                if seen == goal:
                    best = cost
                    break
                for n in self.next[at]:
                    now = seen
                    if self.kinds[n] in accesses:
                        i = kinds.index(self.kinds[n])
                        if seen[i] == goal[i]:
                            continue
                        now = seen[:i] + (seen[i] + 1,) + seen[i + 1 :]
                    following = (n, now)
                    if cost + 1 < costs.get(following, 1 << 30):
                        costs[following] = cost + 1
                        heapq.heappush(queue, (cost + 1, following))
        return best


def check_resources(log, complaints):
    """What ptxas -v says of each kernel."""
    for part in log.split("Compiling entry function '")[1:]:
        name = part.split("'")[0]
        stack, stores, loads = map(int, re.search(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", part).groups())
        registers = int(re.search(r"Used (\d+) registers", part)[1])
        shared = re.search(r"(\d+) bytes smem", part)
        limit = REGISTERS["double" if re.search(r"EdEE|kernelIdE", name) else "float"]
        if stack or stores or loads:
            complaints.append(f"{name}: {stack} bytes of stack, {stores + loads} bytes spilled")
        if registers > limit:
            complaints.append(f"{name}: {registers} registers, {limit} allowed")
        if shared and int(shared[1]) > SHARED:
            complaints.append(f"{name}: {shared[1]} bytes of shared memory")


def check_operations(ptx, complaints):
    for operation in set(re.findall(r"\b(\w+(?:\.\w+)*\.(?:approx|ftz)(?:\.\w+)*)\b", ptx)) - SEEDS:
        complaints.append(f"{operation} is in the PTX")


def check(arch, arguments):
    complaints, figures = [], []
    with tempfile.TemporaryDirectory() as folder:
        cubin = pathlib.Path(folder) / "all.cubin"
        command = [arguments.nvcc, "-std=c++17", f"-arch=sm_{arch}", "-O3", "-Werror", "all-warnings",
                   "-Xptxas", "-v", f"-I{ROOT}/include", "--keep", "--keep-dir", folder, "-cubin",
                   str(arguments.source), "-o", str(cubin)]
        compiled = subprocess.run(command, capture_output=True, text=True)
        if compiled.returncode:
            return [f"sm_{arch}: does not compile: {compiled.stderr[:2000]}"], []
        check_resources(compiled.stderr, complaints)
        for ptx in pathlib.Path(folder).glob("*.ptx"):
            check_operations(ptx.read_text(), complaints)
        codes = dict(kernels_of(cubin))
    for format, part in KERNELS.items():
        limit = LIMITS[format].get(int(arch))
        if limit is None:
            continue
        names = [n for n in codes if "step_kernel" in n and part in n]
        count = Code(codes[names[0]], int(arch)).shortest(ACCESSES[format]) if names else None
        if count is None:
            complaints.append(f"{format}: the hot path was not found")
            continue
        figures.append(f"{format} {count / 8:.1f}")
        if count / 8 > limit:
            complaints.append(f"{format}: {count / 8:.1f} instructions per parameter, {limit} allowed")
    return [f"sm_{arch}: {c}" for c in complaints], figures


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nvcc", default="nvcc")
    parser.add_argument("--arch", default="", help="80,90; all that nvcc knows if empty")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--source", default=ROOT / "cmake" / "leanopt_cuda.cu")
    arguments = parser.parse_args()
    if not shutil.which(arguments.nvcc):
        sys.exit(f"no nvcc: {arguments.nvcc} (LEANOPT_CUDA=OFF goes without)")
    if arguments.arch:
        archs = arguments.arch.split(",")
    else:
        listed = subprocess.run([arguments.nvcc, "--list-gpu-arch"], capture_output=True, text=True, check=True)
        archs = sorted(re.findall(r"compute_(\d+)", listed.stdout), key=int)
    failed = 0
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        for arch, (complaints, figures) in zip(archs, pool.map(lambda a: check(a, arguments), archs)):
            failed += len(complaints)
            print(f"sm_{arch}: {'failed' if complaints else 'passed'}", *figures, sep="  ", flush=True)
            for complaint in complaints:
                print("   ", complaint, flush=True)
    print(f"{len(archs)} architectures, {failed} checks failed")
    return min(failed, 100)


if __name__ == "__main__":
    sys.exit(main())
