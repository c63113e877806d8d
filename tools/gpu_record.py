"""The page about a run on GPUs: the machine, counts, failed and skipped tests, the reasons."""

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def machine():
    """The machine as the benchmarks describe it, with its number of devices."""
    os.environ["MANAGEDMEM_DRIVER"] = "cuda"
    sys.path.insert(0, str(ROOT))
    import managedmem
    from benchmarks import report

    return {**report.machine(), "devices": managedmem.Device.count(), "kernel": platform.release()}


def commit_of_sources():
    """The commit of this clone, with a mark if files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def table(heads, rows):
    lines = [heads, ["---"] * len(heads), *rows]
    cells = [[str(cell).replace("|", "\\|").replace("\n", " ") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells) + "\n"


def name_of_page(facts):
    """The date, the card and the number of devices, as a file name."""
    card = re.sub(r"[^a-z0-9]+", "-", facts["gpu"].lower()).strip("-")
    many = f"-x{facts['devices']}" if facts["devices"] > 1 else ""
    return f"{facts['date']}-{card}{many}.md"


def text_of(results, facts, commit):
    """The page, in Markdown."""
    devices = f"{facts['devices']} x " if facts["devices"] > 1 else ""
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    parts = [
        f"# {facts['date']}: {devices}{facts['gpu']}\n",
        table(
            ["fact", "value"],
            [
                ["driver", f"CUDA {facts['driver']}"],
                ["Python", facts["python"]],
                ["machine", f"{facts['machine']}, Linux {facts['kernel']}"],
                ["libraries", versions],
                ["commit", commit],
            ],
        ),
        "## Runs\n",
        table(
            ["run", "passed", "failed", "skipped", "seconds", "note"],
            [row_of(name, result) for name, result in results.items()],
        ),
    ]
    failed = sorted({test for result in results.values() for test in result["failed"]})
    parts += ["## Failed\n", "\n".join(f"- `{test}`" for test in failed) or "Nothing.", ""]
    reasons = results.get("whole", results.get("files", {})).get("reasons", {})
    if reasons:
        rows = sorted(reasons.items(), key=lambda item: (-item[1], item[0]))
        parts += ["## Skipped\n", table(["reason", "tests"], rows)]
    if text := results.get("benchmarks", {}).get("text"):
        parts += ["## Benchmarks\n", f"```text\n{text.rstrip()}\n```\n"]
    return "\n".join(parts)


def row_of(name, result):
    counts = result.get("counts", {})
    failed = counts.get("failed", len(result["failed"]))
    seconds = result.get("seconds", "")
    return [
        name,
        counts.get("passed", ""),
        failed,
        counts.get("skipped", ""),
        seconds,
        result.get("note", ""),
    ]


def write(results, folder, commit=None):
    """Write the page into a folder; its path."""
    facts = machine()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name_of_page(facts)
    path.write_text(text_of(results, facts, commit or commit_of_sources()), encoding="utf-8")
    return path
