"""Adds up ctest's JUnit files: every skipped test with its reason, then ctest's own closing line."""

import sys
import xml.etree.ElementTree as ElementTree


def reason_of(case):
    """What GTEST_SKIP() was given; of a program without GoogleTest, all that it printed."""
    lines = case.findtext("system-out", "").splitlines()
    starts = [i for i, line in enumerate(lines) if line.endswith(": Skipped")]
    if starts:
        ends = [i for i, line in enumerate(lines) if line.startswith("[  SKIPPED ]")]
        lines = lines[starts[0] + 1 : ends[0]]
    return "; ".join(line.strip() for line in lines if line.strip()) or "no reason given"


def main(reports):
    total = failed = skipped = 0
    for report in reports:
        for case in ElementTree.parse(report).getroot().iter("testcase"):
            total += 1
            if case.find("failure") is not None:
                failed += 1
            elif case.find("skipped") is not None:
                skipped += 1
                print(f"skipped in {report}: {case.get('name')}: {reason_of(case)}")
    print(f"{skipped} tests skipped")
    ran = total - skipped
    percent = 100 * (ran - failed) // ran if ran else 0
    print(f"\n{percent}% tests passed, {failed} tests failed out of {ran}")
    return 0 if ran and not failed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
