"""All that a machine with an NVIDIA GPU can tell about leanopt::cuda, by one command:

    python3 tests/device/run.py --out results.json [--sources DIR] [--build DIR] [--minutes 8]

Configures for the GPU that is here and the LibTorch that cmake finds (the torch of this python3, if
CMAKE_PREFIX_PATH names no other), builds the tests, the bench and the demo, runs `ctest -L gpu`,
compute-sanitizer over a few tests, the bench and a short training run, and writes what came out of
it, with versions and times, as JSON. A stage that ends badly or late is recorded, and the next one
begins; those for which no time is left are skipped and named. Exit status: 0 where all went well, 1
where something failed, 77 where there is no GPU.

GoogleTest, Google Benchmark and nlohmann/json are the machine's own packages, downloads, or, where
neither can be had, folders of DIR, which this command fills on another machine of the same kind:

    python3 tests/device/run.py --pack DIR
"""
import argparse
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree

ROOT = pathlib.Path(__file__).resolve().parents[2]
SKIPPED = 77
PROGRAMS = ("device", "device_roots", "cuda_bench", "demo_cuda")

# What compute-sanitizer takes seconds for: every kernel, but few tensors.
WATCHED = "OnADevice.StepsLeaveTheBitsOfTheCpu:OnADevice.ScalarsAreRead*:Codes.*"

# The projects of packages that are no sources.
PROJECTS = {
    "benchmark": """add_library(benchmark SHARED IMPORTED GLOBAL)
set_target_properties(benchmark PROPERTIES
  IMPORTED_LOCATION ${CMAKE_CURRENT_SOURCE_DIR}/libbenchmark.so
  INTERFACE_INCLUDE_DIRECTORIES ${CMAKE_CURRENT_SOURCE_DIR}/include)
add_library(benchmark::benchmark ALIAS benchmark)
""",
    "nlohmann_json": """add_library(nlohmann_json INTERFACE)
target_include_directories(nlohmann_json INTERFACE ${CMAKE_CURRENT_SOURCE_DIR}/include)
add_library(nlohmann_json::nlohmann_json ALIAS nlohmann_json)
""",
}


def pack(folder):
    """Puts Debian's googletest, libbenchmark-dev and nlohmann-json3-dev into `folder`."""
    system = pathlib.Path("/usr")
    shutil.copytree(system / "src/googletest", folder / "googletest")
    for name, project in PROJECTS.items():
        headers = name.removesuffix("_json")
        shutil.copytree(system / "include" / headers, folder / name / "include" / headers)
        (folder / name / "CMakeLists.txt").write_text(project)
    for library in system.glob("lib/*/libbenchmark.so*"):
        shutil.copy(library, folder / "benchmark")


def words_of(*command):
    """What a command prints, or nothing where it cannot."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def gpus():
    """Name, driver and memory of each GPU."""
    query = "--query-gpu=name,driver_version,memory.total"
    return words_of("nvidia-smi", query, "--format=csv,noheader").splitlines()


class Stages:
    """Commands, one after the other, within a time that all of them have together."""

    def __init__(self, minutes):
        self.end = time.monotonic() + 60 * minutes
        self.scale = minutes / 8
        self.done = []

    def run(self, name, seconds, command, **environment):
        """Output of the command and whether it ended well. It may take so many seconds of 8 minutes."""
        seconds = min(seconds * self.scale, self.end - time.monotonic())
        stage = {"name": name, "command": " ".join(map(str, command)), "result": "skipped: no time left"}
        self.done.append(stage)
        output = ""
        if seconds > 1:
            begin = time.monotonic()
            output, stage["result"] = self.finish(command, seconds, environment)
            stage["seconds"] = round(time.monotonic() - begin, 1)
        if stage["result"] != "ok":
            stage["output"] = output[-4000:]
        print(f"=== {name}: {stage['result']}, {stage.get('seconds', 0)} s", flush=True)
        return output, stage["result"] == "ok"

    @staticmethod
    def finish(command, seconds, environment):
        try:
            process = subprocess.Popen(list(map(str, command)), text=True, stdout=subprocess.PIPE,
                                       stderr=subprocess.STDOUT, start_new_session=True,
                                       env={**os.environ, **environment})
        except OSError as error:
            return str(error), "failed: " + str(error)
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return process.communicate()[0], f"failed: not done after {seconds:.0f} s"
        code = process.returncode
        return output, "ok" if code == 0 else f"failed: exit status {code}"

    def skip(self, name, why):
        self.done.append({"name": name, "result": "skipped: " + why})
        print(f"=== {name}: skipped: {why}", flush=True)


def options_of(sources):
    """What tells cmake of packages in a folder."""
    if not sources:
        return []
    return [f"-DFETCHCONTENT_SOURCE_DIR_{name.upper()}={sources.resolve() / name}"
            for name in ("googletest", "benchmark", "nlohmann_json") if (sources / name).is_dir()]


def tests_in(report):
    """Name, result and seconds of each ctest."""
    if not report.exists():
        return []
    return [{"name": case.get("name"), "result": case.get("status"), "seconds": float(case.get("time"))}
            for case in ElementTree.parse(report).getroot().iter("testcase")]


def figures_in(report):
    """The rows of the bench: microseconds of a step and its counters."""
    if not report.exists():
        return []
    rows = json.loads(report.read_text())["benchmarks"]
    unwanted = {"family_index", "per_family_instance_index", "repetitions", "repetition_index",
                "threads", "iterations", "cpu_time", "run_name", "run_type", "time_unit"}
    return [{key: value for key, value in row.items() if key not in unwanted} for row in rows]


def watch(stages, program):
    """compute-sanitizer's three tools over the tests of WATCHED: what each says last."""
    sanitizer = shutil.which("compute-sanitizer", path=os.environ["PATH"] + ":/usr/local/cuda/bin")
    verdicts = {}
    for tool in ("memcheck", "racecheck", "synccheck"):
        if not sanitizer:
            stages.skip(tool, "there is no compute-sanitizer")
            continue
        # Without LibTorch's cache every tensor is an allocation of its own, with an end to overrun.
        output, _ = stages.run(tool, 80, [sanitizer, "--tool", tool, "--error-exitcode", "9",
                                          "--kernel-name", "kernel_substring=leanopt", program,
                                          f"--gtest_filter={WATCHED}"],
                               PYTORCH_NO_CUDA_MEMORY_CACHING="1")
        verdicts[tool] = re.findall(r"=+ ((?:ERROR|RACECHECK) SUMMARY.*)", output)
    return verdicts


def check(build, sources, minutes):
    """All stages, as the dictionary that becomes the report."""
    stages = Stages(minutes)
    programs = {name: build / folder / name for name, folder in
                (("device", "tests/device"), ("cuda_bench", "bench"), ("demo_cuda", "examples"))}
    results = {"gpus": gpus(), "nvcc": words_of("nvcc", "--version").splitlines()[-2:],
               "commit": words_of("git", "-C", ROOT, "describe", "--always", "--dirty")}
    output, is_ready = stages.run("configure", 90, [
        "cmake", "-S", ROOT, "-B", build, "-DCMAKE_BUILD_TYPE=Release", "-DLEANOPT_CUDA=ON",
        "-DLEANOPT_FETCH_TORCH=OFF", "-DCMAKE_CUDA_ARCHITECTURES=native", *options_of(sources)])
    results["configured"] = re.findall(r"-- leanopt: (.*)", output)
    if is_ready:
        _, is_ready = stages.run("build", 270, ["cmake", "--build", build, "--parallel",
                                                len(os.sched_getaffinity(0)), "--target", *PROGRAMS])
    if not is_ready:
        stages.skip("tests, sanitizer, bench, training", "there is nothing to run")
    else:
        report = build / "gpu.xml"
        stages.run("ctest -L gpu", 150, ["ctest", "--test-dir", build, "-L", "^gpu$", "--output-on-failure",
                                         "--no-tests=error", "--output-junit", report])
        results["tests"] = tests_in(report)
        figures = build / "cuda_bench.json"
        stages.run("bench", 90, [programs["cuda_bench"], "--seconds=3", "--benchmark_out_format=json",
                                 f"--benchmark_out={figures}"])
        results["figures"] = figures_in(figures)
        results["training"], _ = stages.run("training", 40, [programs["demo_cuda"], "--device", "cuda",
                                                             "--epochs", 3, "--no-sizes"])
        results["sanitizer"] = watch(stages, programs["device"])
    return {**results, "stages": stages.done}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, help="where the report goes")
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build/gpu", help="default: build/gpu")
    parser.add_argument("--sources", type=pathlib.Path, help="a folder that --pack has filled")
    parser.add_argument("--minutes", type=float, default=8, help="for all stages; default 8")
    parser.add_argument("--pack", type=pathlib.Path, metavar="DIR", help="fill DIR for --sources")
    given = parser.parse_args()
    if given.pack:
        pack(given.pack)
        return 0
    if not given.out:
        parser.error("--out is needed")
    if not gpus():
        print("skipped: nvidia-smi shows no GPU on this machine")
        return SKIPPED
    report = check(given.build.resolve(), given.sources, given.minutes)
    given.out.write_text(json.dumps(report, indent=1) + "\n")
    is_good = not any(stage["result"].startswith("failed") for stage in report["stages"]) and all(
        test["result"] == "run" for test in report.get("tests", []))
    print(f"{given.out}: {'all went well' if is_good else 'not all went well'}")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
