#!/usr/bin/env python3
"""Draws a figure, time and state of a step, from what step_bench measured:

  build/bench/step_bench --seconds=30 --threads=1 --benchmark_filter='distilbert/.*/[^m]' \\
      --benchmark_out=speed.json
  bench/figures/draw.py speed.json bench/figures/speed.svg
"""

import argparse
import json
import pathlib
import xml.sax.saxutils

# Type and contestant as step_bench names them, and what the figure calls them.
PEERS = {
    "float32/torch::optim::AdamW": "torch::optim::AdamW",
    "float32/at::_fused_adamw_": "AdamW(fused=True)'s kernel",
    "float32/Adafactor_of_operators": "Adafactor in LibTorch's operators",
}
OURS = {
    "float32/leanopt::AdamW": "leanopt::AdamW",
    "float32/leanopt::AdamW8bit": "leanopt::AdamW8bit",
    "float32/leanopt::Adafactor": "leanopt::Adafactor",
    "float32/leanopt::Adafactor8bit": "leanopt::Adafactor8bit",
    "bfloat16/adamw<log8,split24>": "basic_adamw<log8, split24>, bf16",
    "bfloat16/adafactor<log8,split24>": "basic_adafactor<log8, split24>, bf16",
}

# Greys and a blue with as much contrast on white as on black.
TEXT, PALE, PEER, OWN = "#6e7781", "#8c959f", "#9aa3ad", "#2f7fd1"
WIDTH, LABELS, PANEL, GAP, PITCH, THICK, TOP = 860, 262, 230, 66, 26, 16, 84


def measured(report, problem, threads):
    """ns and bytes of state per parameter of each row of one problem, by type and contestant."""
    found = {}
    threads_name = f"{threads}_thread" + ("s" if threads > 1 else "")
    for row in report["benchmarks"]:
        step, of, kind, on, *contestant = row["name"].split("/")
        if (step, of, on) == ("step", problem, threads_name):
            # Google Benchmark adds how it counted to the name.
            found[f"{kind}/{contestant[0]}"] = (row["ns/param"], row["state_B/param"])
    missing = [name for name in (*PEERS, *OURS) if name not in found]
    if missing:
        raise SystemExit(f"no row of {problem} with {threads_name} for {', '.join(missing)}")
    return found


def text(x, y, what, style=""):
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{xml.sax.saxutils.escape(what)}</text>'


def panel(left, caption, values):
    """One column of bars, the longest as wide as the panel."""
    scale = PANEL / max(value for value, _ in values)
    yield text(left, TOP - 14, caption, f'fill="{TEXT}"')
    for i, (value, colour) in enumerate(values):
        y = TOP + i * PITCH
        yield (
            f'<rect x="{left}" y="{y}" width="{max(value * scale, 1):.1f}" height="{THICK}" '
            f'rx="2" fill="{colour}"/>'
        )
        figure = f"{value:.2f}"
        yield text(left + value * scale + 6, y + 12.5, figure, f'fill="{TEXT}"')


def draw(found, title, subtitle):
    rows = [(label, PEER, found[name]) for name, label in PEERS.items()]
    rows += [(label, OWN, found[name]) for name, label in OURS.items()]
    height = TOP + len(rows) * PITCH + 6
    second = LABELS + PANEL + GAP
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" role="img" font-size="13" '
        "font-family=\"system-ui, 'Segoe UI', Helvetica, Arial, sans-serif\">",
        f"<title>{xml.sax.saxutils.escape(title)}</title>",
        text(0, 18, title, f'font-size="16" font-weight="600" fill="{TEXT}"'),
        text(0, 40, subtitle, f'fill="{PALE}"'),
    ]
    for i, (label, _, _) in enumerate(rows):
        style = f'text-anchor="end" fill="{TEXT}"'
        lines.append(text(LABELS - 12, TOP + i * PITCH + 12.5, label, style))
    lines += panel(LABELS, "ns per parameter", [(row[2][0], row[1]) for row in rows])
    lines += panel(second, "bytes of state per parameter", [(row[2][1], row[1]) for row in rows])
    return "\n".join([*lines, "</svg>", ""])


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("report", type=pathlib.Path, help="step_bench's --benchmark_out")
    parser.add_argument("figure", type=pathlib.Path, help="the SVG file to write")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()

    report = json.loads(options.report.read_text())
    found = measured(report, "distilbert", options.threads)
    counted = "one thread" if options.threads == 1 else f"{options.threads} threads"
    copies = [
        figure.split(":")[0]
        for key, figure in report["context"].items()
        if key.startswith(f"copy, {options.threads} ")
    ]
    subtitle = f"DistilBERT, 65.8 million parameters in 104 tensors, {counted}"
    if copies:
        subtitle += f"; a copy moves {copies[0]}"
    options.figure.write_text(draw(found, "What a step takes, and what it keeps", subtitle))


if __name__ == "__main__":
    main()
