"""Adds up ctest's JUnit files: every skipped test with its reason, then ctest's own closing line."""

import sys
import xml.etree.ElementTree as ElementTree


def reason_of(case):
    """What GTEST_SKIP() was given: the lines between GoogleTest's 'Skipped' and its [  SKIPPED ]."""
    lines = case.findtext("system-out", "").splitlines()
    starts = [i for i, line in enumerate(lines) if line.endswith(": Skipped")]
    if not starts:
        return case.find("skipped").get("message", "no reason given")
    reason = []
    for line in lines[starts[0] + 1:]:
        if line.startswith("[  SKIPPED ]"):
            break
        reason.append(line.strip())
    return " ".join(filter(None, reason)) or "no reason given"


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
