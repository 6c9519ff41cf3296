"""Adds up ctest's JUnit files: every skipped test with its reason, then ctest's own closing line."""

import re
import sys
import xml.etree.ElementTree as ElementTree

# What GoogleTest prints for GTEST_SKIP() << "reason". A ctest may be a whole program of cases, of
# which some are skipped while the ctest passes.
GTEST_SKIP = re.compile(r": Skipped\n(.*?)^\[  SKIPPED \] (\S+) \(", re.DOTALL | re.MULTILINE)


def one_line(text):
    """`text` without line breaks; a skip without a word of explanation shows as such."""
    return "; ".join(line.strip() for line in text.splitlines() if line.strip()) or "NO REASON"


def skips_of(case):
    """(name, reason) of each test that did not run in this ctest."""
    output = case.findtext("system-out", "")
    skips = [(name, one_line(reason)) for reason, name in GTEST_SKIP.findall(output)]
    if not skips and case.find("skipped") is not None:
        skips = [("all", one_line(output))]
    return skips


def main(reports):
    ran = failed = skipped = 0
    for report in reports:
        for case in ElementTree.parse(report).getroot().iter("testcase"):
            for name, reason in skips_of(case):
                skipped += 1
                print(f"skipped in {report}, {case.get('name')}: {name}: {reason}")
            ran += case.find("skipped") is None
            failed += case.find("failure") is not None
    print(f"{skipped} tests skipped")
    percent = 100 * (ran - failed) // ran if ran else 0
    print(f"\n{percent}% tests passed, {failed} tests failed out of {ran}")
    return 0 if ran and not failed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
