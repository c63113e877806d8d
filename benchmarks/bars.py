"""Draws the time and the memory of each way to run a language model, as bars.

The picture has no background, and its text follows the colour scheme of the page, so that it can be
read on light and dark pages. The text is large enough for a width of 400 pixels.
"""

from __future__ import annotations

from xml.sax.saxutils import escape

from .measure import Row
from .report import SCALES, Report

MODEL = "Llama, 6.8 GB in 2 GiB"
NAMES = {
    "resident": "all on the GPU",
    "ours": "managedmem: offload()",
    "by hand": "pinned copies, by hand",
    "diffusers block": "diffusers, by block",
    "diffusers leaf": "diffusers, by leaf",
    "accelerate": "accelerate",
}
WIDTH, LEFT, RIGHT, STEP, TOP = 480, 8, 90, 54, 80
STYLE = """
text { font: 15px system-ui, sans-serif; fill: #1f2328 }
.small { font-size: 13px }
.time { fill: #e69f00 } .memory { fill: #0072b2 }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .memory { fill: #56b4e9 } }
"""


def bar(y: int, value: float, most: float, kind: str, unit: str) -> str:
    """One bar with its number. A bar that is longer than the picture ends at its edge."""
    room = WIDTH - LEFT - RIGHT
    length = room * min(1.0, value / most)
    number = f"{value:,.0f} {unit}" if value >= 1000 else f"{value:.3g} {unit}"
    number += " ▸" * (value > most)
    return (
        f'<rect class="{kind}" x="{LEFT}" y="{y}" width="{length:.1f}" height="12" rx="2"/>'
        f'<text class="small" x="{LEFT + length + 6:.1f}" y="{y + 11}">{number}</text>'
    )


def picture(results: Report) -> str:
    """The picture of the rows about the model."""
    rows: dict[str, Row] = {row.operation: row for row in results.groups["language"]}
    times, taken = (rows[f"{MODEL}: {row}"].results for row in ("a token", "taken"))
    slowest = 2 * times["diffusers block"].median / SCALES["ms"]  # longer ones end at the edge
    largest = taken["resident"].median / SCALES["MB"]
    card = escape(results.machine["gpu"])
    lines = [
        f'<text x="{LEFT}" y="20">A Llama of 6.8 GB on one GPU, with a budget of 2 GiB</text>',
        f'<text class="small" x="{LEFT}" y="42"><tspan class="time">■</tspan> time of a token '
        f'<tspan class="memory">■</tspan> GPU memory taken ({card})</text>',
        f'<text class="small" x="{LEFT}" y="60">▸ goes beyond the picture</text>',
    ]
    for i, (key, name) in enumerate(NAMES.items()):
        y = TOP + i * STEP
        lines.append(f'<text x="{LEFT}" y="{y + 12}">{escape(name)}</text>')
        lines.append(bar(y + 18, times[key].median / SCALES["ms"], slowest, "time", "ms"))
        lines.append(bar(y + 32, taken[key].median / SCALES["MB"], largest, "memory", "MB"))
    height = TOP + STEP * len(NAMES)
    body = "\n".join(lines)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}">\n'
        f"<style>{STYLE}</style>\n{body}\n</svg>\n"
    )
